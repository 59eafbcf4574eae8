"""/metrics: the backend's own counters, read at each scrape, and latencies seen by the server. vLLM's suffixes, our prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from livedraft.server.openai_api import Served
from livedraft.speculation.stats import SpeculationStats

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PREFIX = "livedraft:"


class Metrics:
    """One registry a server. Label sets stay small: no users, no request ids."""

    def __init__(self, served: Callable[[], Served | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_BackendCollector(served))
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to the first token.")
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens; a round's gap is shared."
        )
        self.request_latency = self._histogram("e2e_request_latency_seconds", "Arrival to the last token.")
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to a free slot.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_PREFIX + name, text, registry=self.registry, buckets=_SECONDS)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _BackendCollector(Collector):
    def __init__(self, served: Callable[[], Served | None]) -> None:
        self._served = served

    def describe(self) -> Iterable[Metric]:
        return ()  # names are known at the first scrape; until the model is loaded there is nothing to say

    def collect(self) -> Iterable[Metric]:
        served = self._served()
        if served is None:
            return
        snapshot = served.backend.snapshot()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=snapshot[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=snapshot[name])
        finished = CounterMetricFamily(
            _PREFIX + "request_success", "Requests that ended, by how.", labels=["finished_reason"]
        )
        for reason, number in snapshot["finished"].items():
            finished.add_metric([reason], number)
        yield finished
        yield from _speculation(served.draft_name, snapshot["speculation"])
        for name, value in served.learning().items():
            yield GaugeMetricFamily(f"{_PREFIX}learning_{name}", "Of the trainer and its traces.", value=value)


_GAUGES = {
    "num_requests_running": "Requests in a slot.",
    "num_requests_waiting": "Requests without one.",
    "num_slots": "Requests that can run together.",
    "kv_cache_usage_perc": "Share of the KV memory in use, 0 to 1.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests.",
    "generation_tokens": "Output tokens of finished requests.",
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prefix_cache_hits": "Prompt tokens copied from another request.",
}


def _speculation(draft: str, by_version: list[tuple[tuple[str, str], SpeculationStats]]) -> Iterable[Metric]:
    labels = ["draft", "version", "route"]
    families = {
        name: CounterMetricFamily(f"{_PREFIX}spec_decode_{name}", text, labels=labels)
        for name, text in {
            "num_drafts": "Rounds with at least one drafted token.",
            "num_draft_tokens": "Drafted tokens.",
            "num_accepted_tokens": "Accepted tokens.",
        }.items()
    }
    per_position = CounterMetricFamily(
        f"{_PREFIX}spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by drafted position.",
        labels=[*labels, "position"],
    )
    for (route, version), stats in by_version:
        values = [version if version in ("prediction", "suffix") else draft, version, route]
        for name, family in families.items():
            family.add_metric(values, getattr(stats, name))
        for position, number in enumerate(list(stats.num_accepted_tokens_per_pos)):
            per_position.add_metric([*values, str(position)], number)
    yield from families.values()
    yield per_position
