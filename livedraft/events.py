"""Structured events: what happened, for the log, the demo's line and the tests. One emitter, any number of listeners."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("livedraft")
start_logger = logging.getLogger("livedraft.start")
Event = dict[str, Any]


def starting(sentence: str) -> None:
    """What a start is busy with for seconds. The command line shows it on standard error; a program that imports livedraft sees
    nothing unless it asks for this logger."""
    start_logger.info("%s", sentence)


class Events:
    """Thread-safe fan-out. A listener that raises is dropped and named; it never harms serving."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def emit(self, name: str, **fields: Any) -> None:
        event = {"event": name, "time": time.time(), **fields}
        logger.info("%s", json.dumps(event, default=str))
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("An event listener failed on %s and is dropped.", name)
                with self._lock:
                    self._listeners = [kept for kept in self._listeners if kept is not listener]


_SENTENCES = {
    "draft_swapped": "Draft {version} serves now; before it was {previous}.",
    "draft_refused": "Draft {version} was refused: {reason}",
    "draft_failed": "Draft {version} failed and drafts no more: {reason}",
    "draft_rolled_back": "Draft {version} was worse live and was rolled back to {previous}: {watch}.",
    "draft_limit_passed": "Request {request} went past the draft's limit of {limit} tokens and decodes plainly.",
    "trial_started": "Draft {version} is compared live with {against}; {share:.0%} of the requests make the difference.",
    "canary_confirmed": "Draft {version} has shown no harm as a canary and takes over from {previous}: {watch}.",
    "watch_ended": "Draft {version} has shown that it is no worse than {previous}: {watch}.",
    "candidate_passed": "Candidate {version} passed the gate: {reason}.",
    "candidate_rejected": "Candidate {version} was rejected by the gate: {reason}.",
    "promoted_by_operator": "{by} put draft {version} into service.",
    "rolled_back_by_operator": "{by} took draft {version} out of service.",
    "route_closed_by_operator": "{by} closed route {route}; the default route's draft serves its requests.",
    "learning_paused": "Learning was paused.",
    "learning_resumed": "Learning goes on.",
    "training_restarted": "Training starts again from {version}, because {reason}; next candidate after "
    "{next_candidate_after} requests.",
    "training_problem": "Training met a problem: {reason}",
    "rate_chosen": "The learning rate {rate:g} suits this traffic best.",
    "earlier_draft_again": "Earlier traffic is back: the draft that served it is tried again as {version}: {reason}.",
    "route_open": "Route {stream} gets a draft of its own, a copy of that of {route}, after {reason}.",
    "route_assign": "Stream {stream} is served by the draft of {route} now: {reason}.",
    "route_close": "Route {route} has no draft of its own any more: {reason}.",
    "drift": "The traffic changed: acceptance fell from {before:.2f} to {alpha:.2f}; training prefers what is new.",
    "trainer_died": "The training process died (exit code {exit_code}); serving goes on. {last_words}",
    "swap_failed": "The registry could not be read: {reason}",
    "shards_set_aside": "{num_shards} damaged trace files were set aside.",
    "texts_not_read": "What was served before could not be read for suffixes: {reason}",
    "traces_dropped": "{num_traces} traces were dropped: {reason}",
    "traces_expired": "{num_traces} traces were too old, or too many, and are deleted.",
    "traces_deleted": "{num_traces} traces were deleted on request.",
    "traces_found": "{num_traces} traces whose rows were lost in a crash are known again.",
    "versions_found": "Drafts that were lost in a crash are known again: {versions}.",
    "database_damaged": "The database was damaged and has been rebuilt; the old file is kept as {kept_as}.",
    "redaction_failed": "A trace was not kept because the redaction function failed: {reason}",
    "clock_jumped": "The clock was set by {seconds} s; for an hour nothing is deleted for its age.",
    "round_failed": "A round failed and its requests were answered with an error: {reason}",
    "request_failed": "Request {request} failed: {reason}",
    "little_to_learn": "Only rejected proposals teach, and a poor draft proposes nothing; fix num_speculative_tokens.",
    "traces_failed": "What a round taught could not be kept, and its requests leave no trace: {reason}",
    "finish_failed": "Something failed after request {request} was answered: {reason}",
    "replica_up": "{replica} is up and serves with draft {version}.",
    "replica_down": "{replica} is down and is tried again in {restart_in_seconds:g} s: {reason}",
    "replica_refused": "{replica} cannot be used: {reason}",
    "replica_swapped": "{replica} drafts with {version} now, not {previous}; it stood still for {paused_seconds:.2f} s.",
    "tap_failed": "{replica} is not tapped any more, and nothing is learnt from it until it restarts: {reason}",
    "shipment_refused": "What a replica sent could not be read: {reason}",
    "draft_waits_for_restart": "Draft {version} passed the gate; vLLM was started without one and takes it at its next start.",
    "slots_reduced": "Memory holds {max_num_seqs} requests together instead of {asked}.",
}


def described(event: Event) -> str:
    """One sentence for people; an event without one is shown as it is."""
    try:
        return _SENTENCES[event["event"]].format(**event)
    except (KeyError, ValueError, TypeError):
        fields = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "time", "id"))
        return f"{event['event'].replace('_', ' ').capitalize()}: {fields}." if fields else event["event"]
