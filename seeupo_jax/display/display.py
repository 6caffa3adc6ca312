"""Where progress is shown: plain lines, or rows at the foot of a terminal that are redrawn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from seeupo_jax.display.terminal import SafeStream
from seeupo_jax.display.view import Row

_TICK_S = 1.0


class Display(Protocol):
    """Shows lines that stay and, where it is `live`, rows that change."""

    live: bool

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def line(self, text: str) -> None: ...


class Plain:
    """Lines of text, each written at once; `tick` is called every second, from a thread."""

    live = False

    def __init__(self, stream: SafeStream, _: Callable[[], Sequence[Row]], tick: Callable[[], Any]):
        self._stream, self._tick = stream, tick
        self._writing, self._over = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        self._ticker.start()

    def stop(self) -> None:
        self._over.set()
        if self._ticker.is_alive():
            self._ticker.join()

    def line(self, text: str) -> None:
        with self._writing:
            self._stream.write(text + "\n")
            self._stream.flush()

    def _run(self) -> None:
        while not self._over.wait(_TICK_S):
            self._tick()


def _rich(*given: Any) -> Display:
    from seeupo_jax.display.live_display import Rich  # rich is imported where there is a terminal

    return Rich(*given)


DISPLAYS: dict[str, Callable[..., Display]] = {"rich": _rich, "plain": Plain}
