"""An engine whose turns are sampled by the policy or, of frozen roles, by other engines."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.rollout.engine.protocol import Action, Engine, Turn
from seeupo_jax.types import UNKNOWN_VERSION

FROZEN_TURNS, FROZEN_TOKENS = "frozen_turns", "frozen_tokens"


@dataclass(frozen=True)
class FrozenPolicy:
    """What plays a role that is not trained. params: of the engine's policy; None: it has them."""

    engine: Engine
    params: Any = None


class RoleEngine:
    """An `Engine` that gives each turn to the engine of its role.

    Several processes have the same roles. Their engines step together, those at servers each by
    itself.

    Args:
      policy: samples the turns of all roles that are not frozen.
      frozen: by role.
    """

    def __init__(self, policy: Engine, frozen: Mapping[str, FrozenPolicy]):
        self._policy, self._frozen = policy, frozen
        self._engines = [policy, *(each.engine for each in frozen.values())]
        self._frozen_keys: set[int] = set()
        self._counts: Counter[str] = Counter()

    @property
    def concurrency(self) -> int:
        return self._policy.concurrency

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self._engines)

    @property
    def poll_interval_s(self) -> float | None:
        return self._policy.poll_interval_s

    def begin(
        self,
        params: Any,
        *,
        seed: int,
        temperature: float | None = None,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        self._policy.begin(params, seed=seed, temperature=temperature, version=version)
        for each in self._frozen.values():
            each.engine.begin(each.params, seed=seed, temperature=temperature)
        self._frozen_keys.clear()
        self._counts = Counter({FROZEN_TURNS: 0, FROZEN_TOKENS: 0})

    def swap(self, params: Any, version: int) -> None:
        """Replaces the policy that is trained; frozen roles keep theirs."""
        self._policy.swap(params, version)

    @property
    def shard_owners(self) -> Sequence[int]:
        return self._policy.shard_owners

    @contextlib.contextmanager
    def one_policy(self) -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            for engine in self._engines:
                entered.enter_context(engine.one_policy())
            yield

    def fits(self, context: Sequence[int]) -> bool:
        return all(engine.fits(context) for engine in self._engines)

    def submit(self, turn: Turn) -> None:
        if turn.role in self._frozen:
            self._frozen_keys.add(turn.key)
            return self._frozen[turn.role].engine.submit(turn)
        self._policy.submit(turn)

    def step(self, unfinished: bool, stop: bool = False) -> list[Action] | None:
        # While one engine of one process has an action under way, no engine of any process ends.
        unfinished = unfinished or self.busy
        steps = [engine.step(unfinished, stop) for engine in self._engines]
        if all(actions is None for actions in steps):
            return None
        actions = [action for actions in steps for action in actions or ()]
        for action in actions:
            if action.key in self._frozen_keys and not action.failure:
                self._counts.update({FROZEN_TURNS: 1, FROZEN_TOKENS: len(action.tokens)})
        return actions

    def cancel(self, key: int) -> None:
        for engine in self._engines:
            engine.cancel(key)

    def release(self, key: int) -> None:
        self._frozen_keys.discard(key)
        for engine in self._engines:
            engine.release(key)

    def usage(self) -> Mapping[str, int]:
        """The policy's counts, what servers of frozen roles report, and the frozen turns."""
        servers = Counter[str]()
        for each in self._frozen.values():
            usage = each.engine.usage()
            servers.update({name: n for name, n in usage.items() if name.startswith("server_")})
        return {**self._policy.usage(), **servers, **self._counts}

    def close(self) -> None:
        """Ends connections to servers of frozen roles."""
        for each in self._frozen.values():
            getattr(each.engine, "close", lambda: None)()

    def seconds(self) -> Mapping[str, float]:
        return self._policy.seconds()
