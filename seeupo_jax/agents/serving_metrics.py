"""Figures of a server in Prometheus' form: /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seeupo_jax.agents.calls import Completion

OUTCOMES = ("answered", "refused", "cancelled")
# Seconds: from a short answer of a small model to a long one of a large model.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServingMetrics:
    """Counts the calls of a server, their tokens and seconds; any thread may read them.

    Args:
      counts: calls by how they ended. running: the number of open calls.
    """

    def __init__(self, counts: Mapping[str, int], running: Callable[[], int]):
        self._registry = own = CollectorRegistry()
        own.register(_Calls(counts, running))
        self._context = Counter("seeupo_context_tokens", "Tokens of contexts.", registry=own)
        self._cached = Counter(
            "seeupo_cached_context_tokens", "Those of them in the KV cache.", registry=own
        )
        self._sampled = Counter("seeupo_sampled_tokens", "Tokens of answers.", registry=own)
        self._first_s = Histogram(
            "seeupo_first_text_seconds",
            "From a request to its first text, of streams.",
            buckets=_SECONDS,
            registry=own,
        )
        self._answer_s = Histogram(
            "seeupo_answer_seconds", "From a request to its answer.", buckets=_SECONDS, registry=own
        )

    def streamed(self, send: Callable[[str], None], began_s: float) -> Callable[[str], None]:
        """The same function, whose first call is timed."""
        first = True

        def timed(text: str) -> None:
            nonlocal first
            if first:
                self._first_s.observe(time.monotonic() - began_s)
            first = False
            send(text)

        return timed

    def answered(self, completion: Completion, began_s: float) -> None:
        """Counts a completion, whose call came at that `time.monotonic()`."""
        self._context.inc(completion.prompt_tokens)
        self._cached.inc(completion.cached_tokens)
        self._sampled.inc(len(completion.pieces))
        self._answer_s.observe(time.monotonic() - began_s)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them (`text/plain; version=0.0.4`)."""
        return generate_latest(self._registry)


class _Calls(Collector):
    def __init__(self, counts: Mapping[str, int], running: Callable[[], int]):
        self._counts, self._running = counts, running

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily("seeupo_calls", "Calls, by how they ended.", labels=["outcome"])
        for outcome in OUTCOMES:
            ended.add_metric([outcome], self._counts.get(outcome, 0))
        yield ended
        yield GaugeMetricFamily("seeupo_open_calls", "Calls without an answer.", self._running())
