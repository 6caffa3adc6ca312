"""The same conversations sampled by `transformers`' `generate` on PyTorch, as agent loops use it.

A batch of conversations goes through its turns in lock step. Before each turn the batch is padded
on the left; finished conversations leave it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers

_WARM_STEPS = 4  # of which compiled ones are traced, captured and replayed


class Conversation(Protocol):
    """All of a conversation but its actions; observation t stands between actions t and t + 1.

    prompt: token ids before the first action.
    lengths: tokens of each turn's action, at least one turn and one token.
    observations: token ids, one fewer than there are turns, none of them empty.
    """

    prompt: Sequence[int]
    lengths: Sequence[int]
    observations: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Result:
    """The results and costs of sampling conversations.

    seconds: wall time from the first prompt to the last token, warm; without `logp_seconds`.
    logp_seconds: wall time that the log-probabilities took, which agent RL needs besides.
    sampled: tokens of the actions, those that are cut off not counted.
    computed: token positions that went through the network, counted there.
    computed_tokens: of these, the ones that held a token of a conversation: neither padding nor
      what a row goes on sampling after its action's end.
    actions: [conversation][turn], token ids, in the order given.
    logp: [conversation][turn], their log-probabilities, of the distribution sampled from.
    """

    seconds: float
    logp_seconds: float
    sampled: int
    computed: int
    computed_tokens: int
    actions: tuple[tuple[list[int], ...], ...]
    logp: tuple[tuple[list[float], ...], ...]


def load(folder: str, device: str, dtype: str) -> Any:
    """A model folder as a PyTorch model that generates.

    What the folder says about sampling (end tokens, top-k) is left out, since a later setting of
    `None` would fall back to it.

    Args:
      device, dtype: PyTorch's names, such as `cpu` and `float32`.
    """
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.to(device).eval()


def run(
    model: Any,
    conversations: Sequence[Conversation],
    *,
    kept: bool,
    temperature: float,
    seed: int,
    batch: int,
    static: bool = False,
) -> Result:
    """Samples every conversation, after a warm-up that is not timed.

    A turn takes as many decode steps as the batch's longest action, and shorter ones are cut off:
    the same work, since `generate` runs rows that have ended on as padding. A prompt is computed
    for each member of its group: `generate` knows no shared prefixes. Layers with a sliding window
    attend to too few keys in `kept` where actions of one turn differ in length.

    Args:
      model: from `load`.
      conversations: each action gets the length that is given, whatever is sampled.
      kept: the KV cache is kept from turn to turn and only new tokens are computed; otherwise each
        turn sends the whole conversation again.
      temperature: nothing else changes the distribution; 0 takes the likeliest token.
      batch: conversations that are sampled together, at least 1.
      static: with `kept`, a KV cache of a fixed size, with which `generate` compiles its decode
        steps on a GPU. A batch keeps its rows to the end: conversations that have ended run on as
        padding.

    Raises:
      ValueError: a token that the model does not have; no batch; `static` without `kept`.
    """
    highest = max(max(map(max, (c.prompt, *c.observations))) for c in conversations)
    if highest >= model.config.vocab_size:
        raise ValueError(
            f"conversations: got token {highest}; allowed: below the model's"
            f" {model.config.vocab_size}."
        )
    if batch < 1:
        raise ValueError(f"batch: got {batch}; allowed: a number >= 1.")
    if static and not kept:
        raise ValueError("static: got True without kept; allowed: with a KV cache that is kept.")
    starts = range(0, len(conversations), batch)
    batches = [conversations[start : start + batch] for start in starts]
    meter = _Meter()
    caches = [_static_cache(model, part) if static else None for part in batches]
    # Compiled steps are not for inference mode; nor for a hook, whose count would change them.
    quiet, counted = (torch.no_grad(), nullcontext()) if static else _uncompiled(model, meter)
    with quiet, counted:
        for part, cache in zip(batches[:1] if not static else batches, caches, strict=False):
            warm = _resend([_Row(c, list(c.prompt)) for c in part], model.device, cache)
            _generate(model, warm, steps=_WARM_STEPS, temperature=temperature)
            if cache is not None:
                cache.reset()
        meter.positions = 0
        torch.manual_seed(seed)
        began = time.perf_counter()
        rows = [
            row
            for part, cache in zip(batches, caches, strict=True)
            for row in _converse(model, part, kept, temperature, meter, cache)
        ]
        seconds = time.perf_counter() - began
    return Result(
        seconds=seconds - meter.logp_seconds,
        logp_seconds=meter.logp_seconds,
        sampled=sum(sum(c.lengths) for c in conversations),
        computed=meter.positions,
        computed_tokens=meter.tokens,
        actions=tuple(row.actions for row in rows),
        logp=tuple(row.logp for row in rows),
    )


@dataclass
class _Meter:
    positions: int = 0
    tokens: int = 0
    logp_seconds: float = 0.0


@dataclass
class _Row:
    """A conversation under way."""

    conversation: Conversation
    context: list[int]
    actions: tuple[list[int], ...] = ()
    logp: tuple[list[float], ...] = ()

    @property
    def finished(self) -> bool:
        return len(self.actions) == len(self.conversation.lengths)

    @property
    def length(self) -> int:
        """Tokens of the next action; none after the last."""
        return 0 if self.finished else self.conversation.lengths[len(self.actions)]

    @property
    def observation(self) -> Sequence[int]:
        """The observation after the last action; none after the last turn."""
        return () if self.finished else self.conversation.observations[len(self.actions) - 1]

    def act(self, tokens: Sequence[int], logp: Sequence[float]) -> None:
        """Appends the next action, from the sampled tokens, and its observation."""
        if self.finished:
            return
        length = self.length
        self.actions += (list(tokens[:length]),)
        self.logp += (list(logp[:length]),)
        self.context += self.actions[-1]
        if not self.finished:
            self.context += self.observation


@dataclass(frozen=True)
class _Given:
    """The context of a turn: [row, position] tensors, padded on the left.

    ids: token ids, arbitrary at padding. mask: 1 at tokens, 0 at padding.
    cache: keys and values of the first positions; None: there are none.
    """

    ids: Any
    mask: Any
    cache: Any = None


def _uncompiled(model: Any, meter: _Meter) -> tuple[Any, Any]:
    return torch.inference_mode(), _counted(model, meter)


def _static_cache(model: Any, conversations: Sequence[Conversation]) -> Any:
    """As long as a batch of conversations becomes whose rows are padded to the longest."""
    turns = range(max(len(c.lengths) for c in conversations))
    longest = prompt = max(len(c.prompt) for c in conversations)
    for turn in turns:
        longest += max(c.lengths[turn] for c in conversations if turn < len(c.lengths))
        answers = (c.observations[turn] for c in conversations if turn < len(c.observations))
        longest += max(map(len, answers), default=0)
    longest = max(longest, prompt + _WARM_STEPS)
    return transformers.StaticCache(config=model.config, max_cache_len=longest)


def _converse(
    model: Any,
    conversations: Sequence[Conversation],
    kept: bool,
    temperature: float,
    meter: _Meter,
    cache: Any,
) -> list[_Row]:
    """Takes one batch through all its turns.

    Args:
      cache: a static one, empty; None: one that grows.
    """
    rows = [_Row(conversation, list(conversation.prompt)) for conversation in conversations]
    active, given, static = rows, _resend(rows, model.device, cache), cache is not None
    while active and not all(row.finished for row in active):
        lengths = [row.length for row in active]
        steps = max(lengths)
        meter.tokens += _tokens_to_compute(given, lengths)
        if static:
            columns = given.ids.shape[1] - int(given.cache.get_seq_length()) + steps - 1
            meter.positions += len(active) * columns
        output = _generate(model, given, steps=steps, temperature=temperature)
        sampled = output.sequences[:, -steps:]
        tokens = sampled.tolist()
        began = time.perf_counter()
        logp = _logp(output.scores, sampled)
        meter.logp_seconds += time.perf_counter() - began
        for row, its_tokens, its_logp in zip(active, tokens, logp, strict=True):
            row.act(its_tokens, its_logp)
        remaining = [index for index, row in enumerate(active) if static or not row.finished]
        active = [active[index] for index in remaining]
        if active and kept:
            given = _keep(output, given, lengths, remaining, active)
        elif active:
            given = _resend(active, model.device)
    return rows


def _tokens_to_compute(given: _Given, lengths: Sequence[int]) -> int:
    """Tokens of the conversations that a turn puts through the network; its last step does not."""
    past = 0 if given.cache is None else int(given.cache.get_seq_length())
    acted = sum(min(length, max(lengths) - 1) for length in lengths)
    return int(given.mask[:, past:].sum()) + acted


def _generate(model: Any, given: _Given, *, steps: int, temperature: float) -> Any:
    """`steps` tokens a row: `sequences` with what was given, `scores` and `past_key_values`."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return model.generate(
        given.ids,
        attention_mask=given.mask,
        past_key_values=given.cache,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=steps,
            return_dict_in_generate=True,
            output_scores=True,  # references to what sampling makes anyway
            **(sampling if temperature > 0 else {"do_sample": False}),
        ),
    )


def _resend(rows: Sequence[_Row], device: Any, cache: Any = None) -> _Given:
    """Whole conversations, nothing of them computed.

    Args:
      cache: an empty one to use; None: one that grows.
    """
    return _Given(*_pad_left([row.context for row in rows], device), cache)


def _keep(
    output: Any,
    given: _Given,
    lengths: Sequence[int],
    remaining: Sequence[int],
    active: Sequence[_Row],
) -> _Given:
    """The context of the next turn: the computed tokens, and the observations after them.

    Tokens that a row sampled after the end of its action stay in the cache as padding. Positions
    are counted from the mask, so padding in the middle of a row does not shift positions.

    Args:
      remaining: indices of the unfinished rows, which are `active`.
    """
    device = given.ids.device
    steps = torch.arange(max(lengths), device=device)
    acted = steps[None, :] < torch.tensor(lengths, device=device)[:, None]
    mask = torch.cat([given.mask, acted.to(given.mask.dtype)], 1)
    ids, cache = output.sequences, output.past_key_values
    if len(remaining) < len(lengths):
        rows = torch.tensor(remaining, device=device)
        ids, mask = ids[rows], mask[rows]
        cache.batch_select_indices(rows)
    new_ids, new_mask = _pad_left([row.observation for row in active], device)
    return _Given(torch.cat([ids, new_ids], 1), torch.cat([mask, new_mask], 1), cache)


def _pad_left(texts: Sequence[Sequence[int]], device: Any) -> tuple[Any, Any]:
    """Token ids and mask, [row, position], every text at the right end of its row."""
    longest = max(map(len, texts))
    ids = [[0] * (longest - len(text)) + list(text) for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _logp(scores: Sequence[Any], sampled: Any) -> list[list[float]]:
    """Log-probabilities [row][step] of the tokens that were sampled from a step's scores."""
    logp = [
        score.gather(1, token[:, None])[:, 0] - score.logsumexp(1)
        for score, token in zip(scores, sampled.T, strict=True)
    ]
    return torch.stack(logp, 1).tolist()


@contextmanager
def _counted(model: Any, meter: _Meter) -> Iterator[None]:
    """Counts the positions that go through the network."""

    def count(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        meter.positions += kwargs["input_ids"].numel()

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
