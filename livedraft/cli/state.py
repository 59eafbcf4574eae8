"""`livedraft drafts`, `learn` and `traces`: looking into a state folder and steering what learns there.

They work on the folder, beside a running server or without one: versions and controls are rows in its database, and the server
and its trainer look at them several times a second.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import platformdirs

from livedraft.drafts.registry import DATABASE_NAME, Registry, read_controls, read_status, set_control
from livedraft.learning.capture import conversation_key, load_secret
from livedraft.learning.store import TraceStore
from livedraft.records import UserError

ROUTE = "default"
_STALE_SECONDS = 10.0


def state_folder(state: Path | None) -> Path:
    """Raises UserError when nothing was ever kept there."""
    folder = state or platformdirs.user_state_path("livedraft")
    if not (folder / DATABASE_NAME).exists():
        raise UserError(f"There is no livedraft state in {folder}; name the folder a server uses with --state.")
    return folder


# --- drafts ---------------------------------------------------------------------------------------------------------


def list_drafts(state: Path | None, *, as_json: bool) -> None:
    rows = [_draft_row(row) for row in Registry(state_folder(state)).versions()]
    if as_json:
        print(json.dumps({"drafts": rows}))
        return
    _print_table("drafts", ["id", "route", "status", "created", "alpha", "parent_alpha", "p_value"], rows)


def _draft_row(row: dict[str, Any]) -> dict[str, Any]:
    decision = row["decision"] or {}
    return {
        "id": row["id"],
        "route": row["route"],
        "status": row["status"],
        "created": _when(row["created_at"]),
        "alpha": decision.get("alpha"),
        "parent_alpha": decision.get("parent_alpha"),
        "p_value": decision.get("p_value"),
    }


def show_draft(state: Path | None, version_id: str) -> None:
    """Everything known of a version, as JSON."""
    registry = Registry(state_folder(state))
    row = next((row for row in registry.versions() if row["id"] == version_id), None)
    if row is None:
        raise UserError(f"There is no version {version_id!r}; see `livedraft drafts list`.")
    print(json.dumps({**row, "manifest": registry.manifest(version_id)}, indent=2))


def promote_draft(state: Path | None, version_id: str) -> None:
    version = Registry(state_folder(state)).serve(version_id, ROUTE, {"promoted_by": "operator", "at": time.time()})
    print(f"{version.id} is in service on route {version.route}; a running server takes it up within a second.")


def roll_back(state: Path | None) -> None:
    version = Registry(state_folder(state)).roll_back(ROUTE, {"rolled_back_by": "operator", "at": time.time()})
    print(f"{version.id} is in service again on route {version.route}; a running server takes it up within a second.")


# --- learn ----------------------------------------------------------------------------------------------------------


def learn_status(state: Path | None, *, as_json: bool) -> None:
    folder = state_folder(state)
    trainer, serving, controls = read_status(folder, "trainer"), read_status(folder, "serving"), read_controls(folder)
    rows = TraceStore(folder).rows(limit=-1)
    scored = [row.alpha for row in rows if row.alpha is not None]
    serving_version = Registry(folder).in_service(ROUTE)
    fields: dict[str, Any] = {
        "in_service": serving_version.id if serving_version else None,
        "paused": bool(controls["paused"]),
        "server_running": _is_fresh(serving),
        "traces": len(rows),
        "alpha_last_100": sum(scored[-100:]) / len(scored[-100:]) if scored else None,
        "trainer": {key: value for key, value in trainer.items() if key != "updated_at"},
        "serving": {key: value for key, value in serving.items() if key != "updated_at"},
        **_shares(trainer, serving),
    }
    if as_json:
        print(json.dumps(fields))
        return
    print(_status_sentence(fields))


def _is_fresh(status: dict[str, Any]) -> bool:
    return bool(status) and time.time() - status["updated_at"] < _STALE_SECONDS


def _shares(trainer: dict[str, Any], serving: dict[str, Any]) -> dict[str, float | None]:
    """Of the time without requests, and of what serving computed; both since the processes started."""
    idle, flops = serving.get("idle_seconds"), serving.get("serve_flops")
    return {
        "spare_share": trainer["train_seconds"] / idle if idle and trainer else None,
        "flops_share": trainer["train_flops"] / flops if flops and trainer else None,
    }


def _status_sentence(fields: dict[str, Any]) -> str:
    trainer = fields["trainer"]
    lines = [
        f"in service   {fields['in_service']}",
        f"traces       {fields['traces']}, alpha of the last 100: {_figure(fields['alpha_last_100'])}",
        f"trainer      {'paused' if fields['paused'] else trainer.get('status', 'never started')}, "
        f"{trainer.get('num_steps', 0)} steps, {trainer.get('num_trained', 0)} requests trained on",
    ]
    if fields["spare_share"] is not None and fields["flops_share"] is not None:
        lines.append(
            f"compute      training used {fields['spare_share']:.0%} of the spare time, "
            f"{fields['flops_share']:.0%} of what serving computed"
        )
    if trainer.get("last_problem"):
        lines.append(f"last problem {trainer['last_problem']}")
    if not fields["server_running"]:
        lines.append("No server is running on this folder.")
    return "\n".join(lines)


def pause_learning(state: Path | None, *, is_paused: bool) -> None:
    set_control(state_folder(state), "paused", int(is_paused))
    print("Learning is paused; serving goes on with the draft it has." if is_paused else "Learning goes on.")


def learn_now(state: Path | None) -> None:
    set_control(state_folder(state), "now")
    print("The trainer offers what it has learnt to the gate as soon as there is evidence.")


# --- traces ---------------------------------------------------------------------------------------------------------


def list_traces(state: Path | None, *, limit: int, as_json: bool) -> None:
    rows = TraceStore(state_folder(state)).rows(limit=-1)
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
    if as_json:
        print(json.dumps({"total": len(rows), "traces": shown}))
        return
    _print_table(
        f"the last {len(shown)} of {len(rows)} traces", ["id", "route", "held_out", "tokens", "draft", "alpha"], shown
    )


def delete_traces(state: Path | None, user: str) -> None:
    folder = state_folder(state)
    count = TraceStore(folder).delete_client(conversation_key([user], load_secret(folder)))
    set_control(folder, "forget")  # the trainer's replay rows and the server's prefix cache
    print(
        f"{count} traces of that user are deleted. Weights already trained on them cannot be unlearnt; "
        "to start afresh give a new --state."
    )


# --- tables ---------------------------------------------------------------------------------------------------------


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def _figure(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _print_table(title: str, columns: list[str], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_figure(row[name]) for name in columns))
    Console().print(table)
