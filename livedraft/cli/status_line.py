"""`livedraft serve`'s line every few seconds: what was served since the last one, and what the draft made of it."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass, field
from typing import Any

from livedraft.drafts.database import read_controls, read_status
from livedraft.records import UserError
from livedraft.server.openai_api import Served
from livedraft.speculation.prediction import VERSION as PREDICTION


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """The backend's counters at one moment, summed over versions; a client's own predictions are not the draft's merit."""

    at: float
    num_tokens: int = 0
    num_finished: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)

    @staticmethod
    def of(snapshot: dict[str, Any], at: float) -> _Counts:
        drafted = [stats for (_, version), stats in snapshot["speculation"] if version != PREDICTION]
        longest = max((len(stats.num_accepted_tokens_per_pos) for stats in drafted), default=0)
        by_position = [0] * longest
        for stats in drafted:
            for position, number in enumerate(list(stats.num_accepted_tokens_per_pos)):
                by_position[position] += number
        return _Counts(
            at=at,
            num_tokens=snapshot.get("num_emitted_tokens", snapshot["generation_tokens"]),
            num_finished=sum(snapshot["finished"].values()),
            num_drafts=sum(stats.num_drafts for stats in drafted),
            num_draft_tokens=sum(stats.num_draft_tokens for stats in drafted),
            num_accepted_by_position=by_position,
        )


class StatusLine:
    """`next()` gives the line, or None when nothing was served since the last one: an idle server is silent. Reads the state
    folder's database, so it belongs on a thread of its own."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._last = _Counts.of(served.backend.snapshot(), time.monotonic())

    def next(self) -> str | None:
        snapshot = self._served.backend.snapshot()
        before, now = self._last, _Counts.of(snapshot, time.monotonic())
        self._last = now
        is_idle = now.num_tokens == before.num_tokens and now.num_finished == before.num_finished
        if is_idle and not snapshot["num_requests_running"] and not snapshot["num_requests_waiting"]:
            return None
        speed = (now.num_tokens - before.num_tokens) / max(now.at - before.at, 1e-9)
        parts = [
            f"running {snapshot['num_requests_running']}, waiting {snapshot['num_requests_waiting']}, "
            f"finished {now.num_finished - before.num_finished}",
            f"{speed:.1f} tokens/s",
            _acceptance(before, now),
            f"draft {snapshot['draft_version']}",
            self._learning(),
        ]
        return " | ".join(parts)

    def _learning(self) -> str:
        state = self._served.state
        try:
            if state is None or not self._served.learning().get("enabled"):
                return "learning off"
            status = "paused" if read_controls(state)["paused"] else read_status(state, "trainer").get("status")
        except (sqlite3.Error, UserError):  # locked just now, or the disk is full
            status = "not known just now"
        return f"trainer: {status or 'starting'}"


def _acceptance(before: _Counts, now: _Counts) -> str:
    """Of the drafts since the last line: accepted / drafted, mean acceptance length, how often each position was accepted, and
    how many tokens were drafted a round."""
    num_drafts = now.num_drafts - before.num_drafts
    num_drafted = now.num_draft_tokens - before.num_draft_tokens
    if num_drafts <= 0 or num_drafted <= 0:
        return "nothing drafted"
    earlier = before.num_accepted_by_position + [0] * len(now.num_accepted_by_position)
    accepted = [number - past for number, past in zip(now.num_accepted_by_position, earlier, strict=False)]
    positions = " ".join(f"{number / num_drafts:.2f}" for number in accepted)
    return (
        f"acceptance rate {sum(accepted) / num_drafted:.2f} (by position {positions}), "
        f"mean acceptance length {1 + sum(accepted) / num_drafts:.2f}, k {num_drafted / num_drafts:.1f}"
    )
