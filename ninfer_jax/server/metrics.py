"""Counters of the HTTP side for Prometheus, and the engine's own numbers at the moment of a scrape."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from ninfer_jax.engine.load import Load

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RECENT = 100


class Metrics:
    """One registry a server; recent: timings of the last requests, without a word of their text."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("ninfer_http_requests", "Requests by route and status", ["route", "status"], registry=registry)
        self.in_flight = Gauge("ninfer_requests_running", "Answers under way", registry=registry)
        self.prompt_tokens = Counter("ninfer_prompt_tokens", "Prompt tokens of answered requests", registry=registry)
        self.cached_tokens = Counter("ninfer_prompt_tokens_cached", "Of those, taken from the prefix cache", registry=registry)
        self.new_tokens = Counter("ninfer_tokens_generated", "Tokens generated", registry=registry)
        self.drafted = Counter("ninfer_tokens_drafted", "Tokens the MTP head proposed", registry=registry)
        self.accepted = Counter("ninfer_tokens_accepted", "Of those, accepted", registry=registry)
        self.finished = Counter("ninfer_answers", "Answers by how they ended", ["reason"], registry=registry)
        self.forced = Counter("ninfer_reasoning_closed", "Reasoning that the server closed", ["cause"], registry=registry)
        self.first_token = Histogram(
            "ninfer_time_to_first_token_seconds", "From the request to its first token", buckets=_SECONDS, registry=registry
        )
        self.per_token = Histogram(
            "ninfer_time_per_token_seconds",
            "Of an answer after its first token",
            buckets=tuple(s / 100 for s in _SECONDS),
            registry=registry,
        )
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.tokens = 0  # generated so far, those of answers under way included
        self._today: dict[str, Any] = {}

    def attach(self, load: Any) -> None:
        """load: a function that returns the engine's `Load`."""
        self.registry.register(_EngineCollector(load))

    def answered(self, record: dict[str, Any]) -> None:
        """Take the numbers of one finished answer, as `Answer` makes them."""
        self.recent.appendleft(record | {"at": time.time()})
        today = self.today()
        today["answers"] += 1
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            today[name] += record[name]
        self.prompt_tokens.inc(record["prompt_tokens"])
        self.cached_tokens.inc(record["cached_tokens"])
        self.new_tokens.inc(record["completion_tokens"])
        self.drafted.inc(record["drafted"])
        self.accepted.inc(record["accepted"])
        self.finished.labels(record["finish_reason"]).inc()
        if record["first_token_s"] is not None:
            self.first_token.observe(record["first_token_s"])
            if record["completion_tokens"] > 1:
                self.per_token.observe((record["total_s"] - record["first_token_s"]) / (record["completion_tokens"] - 1))

    def today(self) -> dict[str, Any]:
        """Answers and tokens of this day, by the machine's clock."""
        date = time.strftime("%Y-%m-%d")
        if self._today.get("date") != date:
            self._today = {"date": date, "answers": 0, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
        return self._today

    def totals(self) -> dict[str, float]:
        """The counters by name, without labels, as the dashboard shows them."""
        names = ("prompt_tokens", "cached_tokens", "new_tokens", "drafted", "accepted")
        return {name: getattr(self, name).collect()[0].samples[0].value for name in names}

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector:
    """The engine's numbers, asked for when somebody scrapes."""

    def __init__(self, load: Any):
        self._load = load

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        load: Load = self._load()
        states = [slot.get("state") for slot in load.slots]
        yield GaugeMetricFamily("ninfer_slots", "Sequences side by side", len(states))
        yield GaugeMetricFamily("ninfer_slots_busy", "Slots with a sequence", sum(state != "free" for state in states))
        yield GaugeMetricFamily("ninfer_requests_waiting", "Requests in the queue", load.waiting)
        yield GaugeMetricFamily("ninfer_pages_used", "Pages in use", load.pages_used)
        yield GaugeMetricFamily("ninfer_pages", "Pages of the pool", load.pages_total)
        hits = CounterMetricFamily("ninfer_cache_tokens", "Prompt tokens from the prefix cache, by tier", labels=["tier"])
        for tier, tokens in load.cached_tokens.items():
            hits.add_metric([tier], tokens)
        yield hits
        for name, value in load.numbers.items():
            yield GaugeMetricFamily(f"ninfer_{name}", name.replace("_", " "), value)
