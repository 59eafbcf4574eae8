"""`livedraft bench scale`: what the loop behind vLLM comes to with 1, 10 or 1,000 replicas, from figures measured on one.

A paper plan, and no measurement: replicas tap, the learner trains on what it can and drops the rest at its door, versions go
through gate and canary to every replica. Time goes by in steps of a second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

_STEP_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Defaults are those of the reference machine and SmolLM2-135M-Instruct (docs/scale.md says where each is from)."""

    replica_tokens_per_second: float = 60.0
    """Output tokens of one replica."""
    tokens_per_request: float = 64.0
    bytes_per_token: float = 440.0
    """Tapped, as it is shipped."""
    learner_tokens_per_second: float = 4000.0
    """Trained, replayed ones included."""
    replay_per_new: float = 3.0
    version_bytes: float = 127e6
    """Of one version as a replica fetches it."""
    learner_bytes_per_second: float = 1.25e9
    """Of the learner's network, each way."""
    requests_per_candidate: float = 12.0
    """At first; later a quarter of all that were trained on (`num_needed` in the trainer)."""
    most_requests_per_candidate: float = 500.0
    """A quarter of what the trainer keeps: old requests leave it."""
    gate_requests: float = 8.0
    """Held out or newer, before a candidate can be judged."""
    promoted_share: float = 0.5
    """Of the candidates."""
    stage_seconds: float = 0.5
    """A replica checks the file it has fetched."""
    pause_seconds: float = 0.3
    canary_rounds: float = 32.0
    tokens_per_round: float = 1.5
    fetches_together: int = 8
    """Replicas that are given a version at the same time, of many (`MOST_TOGETHER` in the rollout)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    num_replicas: int
    tapped_tokens_per_second: float
    tapped_megabytes_per_second: float
    share_trained_on: float
    """Of the tapped tokens; the rest is sampled away."""
    learner_load: float
    """Share of its time in which it trains."""
    promotions_per_hour: float
    swap_megabytes_per_second: float
    """Out of the learner, on average."""
    rollout_seconds: float
    """From the first replica to the last, of one version."""
    staleness_seconds: float
    """Median age, over replicas and time, of the newest request that the draft in service has learnt from."""
    stopped_share: float
    """Of a replica's time, paused for swaps."""


def simulate(num_replicas: int, figures: Figures, *, hours: float = 2.0) -> Outcome:
    """One run, from an empty state."""
    tapped = num_replicas * figures.replica_tokens_per_second
    trainable = figures.learner_tokens_per_second / (1.0 + figures.replay_per_new)
    trained = min(tapped, trainable)
    requests_per_second = tapped / figures.tokens_per_request
    rollout = _rollout_seconds(num_replicas, figures)
    canary = figures.canary_rounds * figures.tokens_per_round / figures.replica_tokens_per_second

    waiting, num_trained, since_candidate = 0.0, 0.0, 0.0
    num_promotions, num_candidates = 0, 0.0
    busy_until = frozen_at = ready_at = 0.0
    served: list[tuple[float, float, float]] = []  # (time the rollout begins, ends, newest request learnt from)
    stalenesses: list[float] = []
    now, end = 0.0, hours * 3600.0
    while now < end:
        waiting += trained * _STEP_SECONDS / figures.tokens_per_request
        num_trained, since_candidate, waiting = num_trained + waiting, since_candidate + waiting, 0.0
        needed = min(max(figures.requests_per_candidate, num_trained / 4), figures.most_requests_per_candidate)
        if since_candidate >= needed and now >= busy_until:
            since_candidate, frozen_at = 0.0, now
            ready_at = now + figures.gate_requests / requests_per_second
            num_candidates += figures.promoted_share
            busy_until = ready_at
            if num_candidates >= num_promotions + 1:
                num_promotions += 1
                busy_until = ready_at + canary + rollout
                served.append((ready_at + canary, busy_until, frozen_at))
        stalenesses.append(_staleness(now, served))
        now += _STEP_SECONDS
    stalenesses.sort()
    return Outcome(
        num_replicas=num_replicas,
        tapped_tokens_per_second=tapped,
        tapped_megabytes_per_second=tapped * figures.bytes_per_token / 1e6,
        share_trained_on=trained / tapped,
        learner_load=min(1.0, tapped / trainable),
        promotions_per_hour=num_promotions / hours,
        swap_megabytes_per_second=num_promotions * num_replicas * figures.version_bytes / end / 1e6,
        rollout_seconds=rollout,
        staleness_seconds=stalenesses[len(stalenesses) // 2],
        stopped_share=num_promotions * figures.pause_seconds / end,
    )


def _rollout_seconds(num_replicas: int, figures: Figures) -> float:
    """Replicas are given a version a few at a time; the learner's network is shared by those."""
    together = max(1, min(figures.fetches_together, num_replicas // 4))
    fetch = figures.version_bytes * together / figures.learner_bytes_per_second
    return (num_replicas / together) * (fetch + figures.stage_seconds + figures.pause_seconds)


def _staleness(now: float, served: list[tuple[float, float, float]]) -> float:
    """Mean over replicas: while a rollout is under way its share has the new version already."""
    newest = [version for version in served if version[0] <= now]
    if not newest:
        return now
    begin, end, frozen_at = newest[-1]
    before = newest[-2][2] if len(newest) > 1 else 0.0
    share = 1.0 if now >= end else (now - begin) / (end - begin)
    return share * (now - frozen_at) + (1.0 - share) * (now - before)


def run(replicas: list[int], changes: dict[str, Any], *, hours: float, as_json: bool) -> None:
    """A table, or one JSON object with `figures` and `outcomes`."""
    figures = Figures(**{name: value for name, value in changes.items() if value is not None})
    outcomes = [simulate(count, figures, hours=hours) for count in replicas]
    if as_json:
        print(json.dumps({"figures": asdict(figures), "outcomes": [asdict(outcome) for outcome in outcomes]}))
        return
    table = Table("", *(f"{outcome.num_replicas:,} replicas" for outcome in outcomes))
    for name in list(asdict(outcomes[0]))[1:]:
        table.add_row(name.replace("_", " "), *(f"{getattr(outcome, name):,.3g}" for outcome in outcomes))
    Console().print(table)
