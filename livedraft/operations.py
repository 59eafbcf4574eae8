"""What an operator can see and do in a state folder; the command line prints it, `/admin` serves it.

Works beside a running server or without one: versions and controls are rows in the folder's database, and the server and its
trainer look at them several times a second. Everything raises UserError with a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from livedraft.drafts.database import read_controls, read_events, read_status, record_events, set_control
from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import DraftWeights
from livedraft.events import described
from livedraft.learning.capture import conversation_key, load_secret
from livedraft.learning.process import trainer_status_name
from livedraft.learning.store import TraceStore
from livedraft.records import DEFAULT_ROUTE, DraftVersion, UserError

_STALE_SECONDS = 10.0


# --- drafts ---------------------------------------------------------------------------------------------------------


def list_drafts(state: Path) -> list[dict[str, Any]]:
    """Every version, oldest first, with what gate and watch measured, and the gate's reason."""
    rows = []
    for row in Registry(state).versions():
        decision = row["decision"] or {}
        numbers = {name: decision.get(name) for name in ("alpha", "parent_alpha", "p_value", "live_rate", "reason")}
        rows.append({name: row[name] for name in ("id", "route", "status", "created_at")} | numbers)
    return rows


def show_draft(state: Path, version_id: str) -> dict[str, Any]:
    """Everything known of a version."""
    registry = Registry(state)
    return registry.version(version_id) | {"manifest": registry.manifest(version_id)}


def diff_drafts(state: Path, first_id: str, second_id: str) -> dict[str, Any]:
    """What lies between two versions: data, vocabulary, weights, and what was measured of each."""
    registry = Registry(state)
    first, second = (_version(registry, version_id) for version_id in (first_id, second_id))
    before, after = registry.load(first), registry.load(second)
    before_ids, after_ids = set(before.draft_to_target_W.tolist()), set(after.draft_to_target_W.tolist())
    decisions = [registry.version(one.id)["decision"] or {} for one in (first, second)]
    return {
        "first": first.id,
        "second": second.id,
        "is_child": second.parent == first.id,
        "requests_between": second.num_requests_seen - first.num_requests_seen,
        "alpha": [decision.get("alpha") for decision in decisions],
        "num_layers": [first.num_layers, second.num_layers],
        "vocabulary_size": [len(before_ids), len(after_ids)],
        "tokens_added": len(after_ids - before_ids),
        "tokens_removed": len(before_ids - after_ids),
        "relative_change": _relative_changes(before, after),
    }


def _version(registry: Registry, version_id: str) -> DraftVersion:
    registry.version(version_id)  # raises the sentence for an unknown id
    return DraftVersion(**registry.manifest(version_id))


def _relative_changes(before: DraftWeights, after: DraftWeights) -> dict[str, float]:
    """|after − before| / |before| of each tensor both have; the head's over the tokens both have."""
    rows = {int(token): row for row, token in enumerate(after.draft_to_target_W)}
    shared = [(row, rows[int(token)]) for row, token in enumerate(before.draft_to_target_W) if int(token) in rows]
    changes = {}
    for name, old in before.tensors.items():
        new = after.tensors.get(name)
        if name == "head" and new is not None:
            old, new = old[[a for a, _ in shared]], new[[b for _, b in shared]]
        if new is not None and new.shape == old.shape:
            changes[name] = round(float(torch.linalg.vector_norm(new - old) / torch.linalg.vector_norm(old)), 4)
    return changes


def promote_draft(state: Path, version_id: str, by: str) -> str:
    registry = Registry(state)
    route = registry.version(version_id)["route"]
    version = registry.serve(version_id, route, {"promoted_by": by, "promoted_at": time.time()})
    _record(state, "promoted_by_operator", version=version.id, by=by)
    return f"{version.id} is in service on route {version.route}; a running server takes it up within a second and watches it."


def roll_back(state: Path, by: str, route: str = DEFAULT_ROUTE) -> str:
    """A canary is withdrawn; without one the version before the one in service comes back."""
    registry = Registry(state)
    canary = registry.canary(route)
    reason = {"rolled_back_by": by, "rolled_back_at": time.time()}
    if canary is not None:
        is_withdrawn = registry.withdraw(canary.id, reason)
    if canary is not None and is_withdrawn:
        _record(state, "rolled_back_by_operator", version=canary.id, by=by)
        return f"The canary {canary.id} is withdrawn; what is in service stays."
    leaving = registry.in_service(route)
    version = registry.roll_back(route, reason)
    _record(state, "rolled_back_by_operator", version=leaving.id if leaving else None, previous=version.id, by=by)
    return f"{version.id} is in service again on route {version.route}; a running server takes it up within a second."


def list_routes(state: Path) -> list[dict[str, Any]]:
    """Every stream of traffic that was seen: requests, acceptance of the newest scored ones, whose draft serves it."""
    registry, store = Registry(state), TraceStore(state)
    routes, assignments = registry.routes(), registry.assignments()
    rows = []
    for stream, (num_traces, alpha) in store.by_route().items():
        served_by = assignments.get(stream, stream)
        served_by = served_by if served_by in routes else DEFAULT_ROUTE
        version = registry.in_service(served_by)
        rows.append(
            {
                "route": stream,
                "served_by": served_by,
                "version": version.id if version else None,
                "traces": num_traces,
                "alpha_last_100": alpha,
            }
        )
    return rows


def close_route(state: Path, route: str, by: str) -> str:
    """The default route's draft serves its requests. Raises UserError for a route that has no draft of its own."""
    registry = Registry(state)
    if route not in registry.routes():
        raise UserError(f"Route {route!r} has no draft of its own; see `livedraft drafts routes`.")
    registry.close_route(route, {"closed_by": by, "closed_at": time.time()})
    _record(state, "route_closed_by_operator", route=route, by=by)
    return f"Route {route} is closed; a running server serves its requests with the default route's draft."


def _record(state: Path, name: str, **fields: Any) -> None:
    record_events(state, [{"event": name, "time": time.time(), **fields}])


# --- learning -------------------------------------------------------------------------------------------------------


def learning_status(state: Path) -> dict[str, Any]:
    """What is in service, what the trainer does, and what it costs."""
    trainer, serving, controls = read_status(state, "trainer"), read_status(state, "serving"), read_controls(state)
    store, registry = TraceStore(state), Registry(state)
    version, canary = registry.in_service(DEFAULT_ROUTE), registry.canary(DEFAULT_ROUTE)
    others = [route for route in registry.routes() if route != DEFAULT_ROUTE]
    by_route = {route: read_status(state, trainer_status_name(route)) for route in others}
    return {
        "in_service": version.id if version else None,
        "canary": canary.id if canary else None,
        "routes": by_route,
        "paused": bool(controls["paused"]),
        "server_running": bool(serving) and time.time() - serving["updated_at"] < _STALE_SECONDS,
        **store.summary(),
        "trainer": {key: value for key, value in trainer.items() if key != "updated_at"},
        "serving": {key: value for key, value in serving.items() if key != "updated_at"},
        **_shares([trainer, *by_route.values()], serving),
    }


def _shares(trainers: Sequence[dict[str, Any]], serving: dict[str, Any]) -> dict[str, float | None]:
    """What the trainers of all routes took of the time without requests, and of what serving computed; both since the
    processes started."""
    idle, flops = serving.get("idle_seconds"), serving.get("serve_flops")
    known = [trainer for trainer in trainers if trainer]
    return {
        "spare_share": sum(one["train_seconds"] for one in known) / idle if idle and known else None,
        "flops_share": sum(one["train_flops"] for one in known) / flops if flops and known else None,
    }


def set_paused(state: Path, is_paused: bool) -> str:
    set_control(state, "paused", int(is_paused))
    _record(state, "learning_paused" if is_paused else "learning_resumed")
    return "Learning is paused; serving goes on with the draft it has." if is_paused else "Learning goes on."


def learn_now(state: Path) -> str:
    set_control(state, "now")
    return "The trainer offers what it has learnt to the gate as soon as there is evidence."


def list_events(state: Path, *, after_id: int = 0, limit: int = 100) -> list[dict[str, Any]]:
    """The newest events, oldest first, each with its sentence."""
    return [event | {"sentence": described(event)} for event in read_events(state, after_id=after_id, limit=limit)]


# --- traces ---------------------------------------------------------------------------------------------------------


def list_traces(state: Path, *, limit: int) -> dict[str, Any]:
    """The newest traces; no text."""
    rows = TraceStore(state).rows(limit=-1)
    shown = [
        {
            "id": row.id,
            "route": row.route,
            "held_out": row.is_held_out,
            "tokens": row.num_output_tokens,
            "draft": row.draft_version,
            "alpha": row.alpha,
        }
        for row in rows[-limit:]
    ]
    return {"total": len(rows), "traces": shown}


def delete_traces(state: Path, user: str | None) -> str:
    """All traces of a user, or of everybody; also from the running trainer and the server's prefix cache."""
    store = TraceStore(state)
    try:
        count = (
            store.delete_all() if user is None else store.delete_client(conversation_key([user], load_secret(state)))
        )
    finally:
        set_control(state, "forget")  # also what was deleted before something failed
    _record(state, "traces_deleted", num_traces=count)
    return (
        f"{count} traces are deleted. Weights already trained on them cannot be unlearnt; a new --state starts afresh."
    )


def require_state(folder: Path, database_name: str) -> Path:
    """Raises UserError when nothing was ever kept there."""
    if not (folder / database_name).exists():
        raise UserError(f"There is no livedraft state in {folder}; name the folder a server uses with --state.")
    return folder
