"""/metrics of a fleet: the learner's own figures, and every replica's with a label that says whose."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from livedraft.drafts.database import read_status
from livedraft.integrations.vllm.replica import ReplicaError
from livedraft.integrations.vllm.service import VllmService
from livedraft.records import UserError

_PREFIX = "livedraft:"
_OF_TRAINER = ("num_steps", "num_trained", "num_train_tokens", "train_seconds", "num_rolled_back", "num_drifts")


def render(service: VllmService, answers: dict[int, int], num_open: int) -> bytes:
    """Asks every replica; off the event loop."""
    registry = CollectorRegistry()
    registry.register(_Collector(service, answers, num_open))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, service: VllmService, answers: dict[int, int], num_open: int) -> None:
        self._service, self._answers, self._num_open = service, answers, num_open

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        answers = CounterMetricFamily(_PREFIX + "answers", "HTTP answers passed on, by status.", labels=["status"])
        for status, number in self._answers.items():
            answers.add_metric([str(status)], number)
        yield answers
        yield GaugeMetricFamily(_PREFIX + "num_requests_running", "Requests at a replica.", value=self._num_open)
        yield from self._learning()
        yield from self._replicas()

    def _learning(self) -> Iterable[Metric]:
        service = self._service
        gauges: dict[str, float] = {"enabled": float(service.capture is not None)}
        if service.capture is not None and service.trainer is not None:
            gauges |= {
                "trainer_up": float(service.trainer.pid is not None),
                "traces_dropped": float(service.capture.num_dropped),
                "traces_redacted": float(service.capture.num_redacted),
                "shipments_refused": float(service.num_bad_shipments),
                "trial_running": float(service.rollout is not None and service.rollout.trial is not None),
            }
            try:
                status = read_status(service.state, "trainer")
                gauges |= {name: float(status[name]) for name in _OF_TRAINER if name in status}
            except (sqlite3.Error, UserError):  # locked just now
                pass
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"{_PREFIX}learning_{name}", "Of the trainer and its traces.", value=value)

    def _replicas(self) -> Iterable[Metric]:
        fleet = self._service.fleet
        if fleet is None:
            return
        labels = ["replica", "version"]
        up = GaugeMetricFamily(_PREFIX + "replica_up", "1 while it serves.", labels=labels)
        tapped = CounterMetricFamily(_PREFIX + "tap_requests", "Requests tapped.", labels=["replica"])
        dropped = CounterMetricFamily(_PREFIX + "tap_dropped", "Requests that were not.", labels=["replica"])
        shipped = CounterMetricFamily(_PREFIX + "tap_bytes", "Sent to the learner.", labels=["replica"])
        swaps = CounterMetricFamily(_PREFIX + "replica_swaps", "Drafts swapped in.", labels=["replica"])
        theirs: dict[str, Metric] = {}
        for member in fleet.members:
            up.add_metric([member.name, member.version], float(member.phase == "ready"))
            swaps.add_metric([member.name], member.num_swaps)
            if member.phase != "ready":
                continue
            try:
                report, text = member.replica.report(), member.replica.metrics_text()
            except ReplicaError:
                continue
            tapped.add_metric([member.name], report["num_requests"])
            dropped.add_metric([member.name], report["num_dropped"])
            shipped.add_metric([member.name], report["num_bytes"])
            for family in text_string_to_metric_families(text):
                if family.name.startswith("vllm:"):
                    merged = theirs.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    for sample in family.samples:
                        merged.add_sample(sample.name, {**sample.labels, "replica": member.name}, sample.value)
        yield from (up, tapped, dropped, shipped, swaps)
        yield from theirs.values()
