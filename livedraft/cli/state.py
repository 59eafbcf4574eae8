"""`livedraft drafts`, `learn` and `traces`: printing what `operations` knows of a state folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import platformdirs

from livedraft import operations
from livedraft.drafts.database import DATABASE_NAME
from livedraft.drafts.registry import WEIGHTS_NAME, Registry
from livedraft.models.pull import resolve_model

_NUM_EVENTS_SHOWN = 5
_OPERATOR = "operator"


def state_folder(state: Path | None) -> Path:
    """Raises UserError when nothing was ever kept there."""
    return operations.require_state(state or platformdirs.user_state_path("livedraft"), DATABASE_NAME)


def say(sentence: str, *, as_json: bool, **fields: Any) -> None:
    """What was done: a sentence or, for programs, the sentence and its figures in one object."""
    print(json.dumps({"message": sentence, **fields}) if as_json else sentence)


def act(do: Callable[..., str], state: Path | None, *arguments: Any, as_json: bool) -> None:
    """Do something to a state folder and say what was done."""
    say(do(state_folder(state), *arguments), as_json=as_json)


def promote_draft(state: Path | None, version_id: str, *, as_json: bool) -> None:
    act(operations.promote_draft, state, version_id, _OPERATOR, as_json=as_json)


def close_route(state: Path | None, route: str, *, as_json: bool) -> None:
    act(operations.close_route, state, route, _OPERATOR, as_json=as_json)


def list_routes(state: Path | None, *, as_json: bool) -> None:
    rows = operations.list_routes(state_folder(state))
    if as_json:
        print(json.dumps({"routes": rows}))
        return
    _print_table("routes", ["route", "served_by", "version", "traces", "alpha_last_100"], rows)


def roll_back(state: Path | None, route: str, *, as_json: bool) -> None:
    act(operations.roll_back, state, _OPERATOR, route, as_json=as_json)


def export_draft(state: Path | None, version_id: str, path: Path, *, format: str, model: str, as_json: bool) -> None:
    from livedraft.export import export_draft as export

    registry = None if (Path(version_id) / WEIGHTS_NAME).exists() else Registry(state_folder(state))
    done = export(registry, version_id, resolve_model(model), path, format=format)
    mass = (
        "" if done.absent_mass is None else f" Tokens it does not know have {done.absent_mass:.3%} of the probability."
    )
    say(
        f"{version_id} is written to {path}: {done.num_layers} layers, {done.vocabulary_size} tokens.{mass}",
        as_json=as_json, path=str(path), num_layers=done.num_layers, vocabulary_size=done.vocabulary_size,
        absent_mass=done.absent_mass,
    )  # fmt: skip


def import_draft(state: Path | None, folder: Path, *, model: str, as_json: bool) -> None:
    from livedraft.export import import_draft as take_in

    version = take_in(Registry(state_folder(state)), folder, resolve_model(model))
    sentence = f"{folder} is version {version.id} now; put it into service with: livedraft drafts promote {version.id}"
    say(sentence, as_json=as_json, version=version.id)


def list_drafts(state: Path | None, *, as_json: bool) -> None:
    rows = [row | {"created": _when(row["created_at"])} for row in operations.list_drafts(state_folder(state))]
    if as_json:
        print(json.dumps({"drafts": rows}))
        return
    columns = ["id", "route", "status", "created", "alpha", "parent_alpha", "p_value", "live_rate"]
    _print_table("drafts", columns, rows)


def show_draft(state: Path | None, version_id: str, *, as_json: bool) -> None:
    print(json.dumps(operations.show_draft(state_folder(state), version_id), indent=None if as_json else 2))


def diff_drafts(state: Path | None, first_id: str, second_id: str, *, as_json: bool) -> None:
    fields = operations.diff_drafts(state_folder(state), first_id, second_id)
    if as_json:
        print(json.dumps(fields))
        return
    changes = fields.pop("relative_change")
    for name, value in fields.items():
        shown = " -> ".join(_figure(one) for one in value) if isinstance(value, list) else _figure(value)
        print(f"{name:>18}  {shown}")
    print(f"{'relative change':>18}")
    for name, change in sorted(changes.items(), key=lambda item: -item[1]):
        print(f"{change:18.3f}  {name}")


def learn_status(state: Path | None, *, as_json: bool) -> None:
    folder = state_folder(state)
    fields = operations.learning_status(folder)
    if as_json:
        print(json.dumps(fields))
        return
    print(_status_sentence(fields))
    events = operations.list_events(folder, limit=_NUM_EVENTS_SHOWN)
    if events:
        print("last events")
        for event in events:
            print(f"  {_when(event['time'])}  {event['sentence']}")


def _status_sentence(fields: dict[str, Any]) -> str:
    trainer = fields["trainer"]
    canary = f"; {fields['canary']} is on trial" if fields["canary"] else ""
    alpha = [fields[name] for name in ("alpha_last_100", "alpha_new_prompts", "alpha_seen_prompts")]
    lines = [
        f"in service   {fields['in_service']}{canary}",
        f"traces       {fields['traces']} in {fields['store_bytes'] / 2**20:.0f} MiB; alpha of the last 100: "
        f"{_figure(alpha[0])} (new prompts {_figure(alpha[1])}, seen ones {_figure(alpha[2])})",
        f"trainer      {'paused' if fields['paused'] else trainer.get('status', 'never started')}, "
        f"{trainer.get('num_steps', 0)} steps, {trainer.get('num_trained', 0)} requests trained on, "
        f"next candidate after {trainer.get('next_candidate_after', '–')} more",
    ]
    if fields["spare_share"] is not None and fields["flops_share"] is not None:
        lines.append(
            f"compute      training used {fields['spare_share']:.0%} of the spare time, "
            f"{fields['flops_share']:.0%} of what serving computed"
        )
    if trainer.get("num_rolled_back"):
        lines.append(f"breaker      open: {trainer['num_rolled_back']} versions in a row were rolled back")
    if trainer.get("last_problem"):
        lines.append(f"last problem {trainer['last_problem']}")
    if not fields["server_running"]:
        lines.append("No server is running on this folder.")
    return "\n".join(lines)


def list_traces(state: Path | None, *, limit: int, as_json: bool) -> None:
    found = operations.list_traces(state_folder(state), limit=limit)
    if as_json:
        print(json.dumps(found))
        return
    title = f"the last {len(found['traces'])} of {found['total']} traces"
    _print_table(title, ["id", "route", "held_out", "tokens", "draft", "alpha"], found["traces"])


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
