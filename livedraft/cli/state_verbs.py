"""The verb table's part that works on a state folder: `drafts`, `learn`, `traces`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from livedraft.cli.options import DEFAULT_MODEL, Dtype, Json, Model, State, Threads
from livedraft.records import DEFAULT_ROUTE

drafts_app = typer.Typer(help="Versions of the draft: look, promote, go back.", no_args_is_help=True)
learn_app = typer.Typer(help="The training beside serving: look, pause, resume, now.", no_args_is_help=True)
traces_app = typer.Typer(help="What is kept of served requests: look, delete.", no_args_is_help=True)


def _known_versions(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion: from the folders alone, because reading the registry would import torch."""
    import platformdirs

    state = Path(context.params.get("state") or platformdirs.user_state_path("livedraft"))
    return sorted(path.name for path in (state / "drafts").glob(f"{incomplete}*") if (path / "manifest.json").exists())


VersionId = Annotated[str, typer.Argument(help="As `drafts list` shows it.", autocompletion=_known_versions)]


@drafts_app.command("list")
def drafts_list(state: State = None, as_json: Json = False) -> None:
    """Every version with what the gate measured."""
    from livedraft.cli.state import list_drafts

    list_drafts(state, as_json=as_json)


@drafts_app.command("show")
def drafts_show(version: VersionId, state: State = None, as_json: Json = False) -> None:
    """One version: where it comes from, its data, the gate's numbers. Always JSON; indented without --json."""
    from livedraft.cli.state import show_draft

    show_draft(state, version, as_json=as_json)


@drafts_app.command("diff")
def drafts_diff(first: VersionId, second: VersionId, state: State = None, as_json: Json = False) -> None:
    """What lies between two versions: data, vocabulary, weights, acceptance."""
    from livedraft.cli.state import diff_drafts

    diff_drafts(state, first, second, as_json=as_json)


@drafts_app.command("export")
def drafts_export(
    version: VersionId,
    path: Annotated[Path, typer.Argument(help="The folder (hf) or file (gguf) to write.")],
    format: Annotated[str, typer.Option(help="hf: a folder for transformers; gguf: a file for llama.cpp.")] = "hf",
    model: Model = DEFAULT_MODEL,
    state: State = None,
    as_json: Json = False,
) -> None:
    """A version, or a folder that `distill` left, as a whole model for other engines, with the target's full vocabulary and a
    card that says where it is from."""
    from livedraft.cli.state import export_draft

    export_draft(state, version, path, format=format, model=model, as_json=as_json)


@drafts_app.command("import")
def drafts_import(
    folder: Annotated[
        Path, typer.Argument(help="A version's folder, or one that `drafts export` wrote for transformers.")
    ],
    model: Model = DEFAULT_MODEL,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Take in a version trained elsewhere for the same target; `drafts promote` puts it into service."""
    from livedraft.cli.state import import_draft

    import_draft(state, folder, model=model, as_json=as_json)


@drafts_app.command("promote")
def drafts_promote(version: VersionId, state: State = None, as_json: Json = False) -> None:
    """Put a version into service, whatever the gate said; the watch still compares it with the one before."""
    from livedraft.cli.state import promote_draft

    promote_draft(state, version, as_json=as_json)


@drafts_app.command("rollback")
def drafts_rollback(
    route: Annotated[str, typer.Option(help="Whose draft.")] = DEFAULT_ROUTE,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Withdraw the canary or, without one, go back to the version before; training goes on from there."""
    from livedraft.cli.state import roll_back

    roll_back(state, route, as_json=as_json)


@drafts_app.command("routes")
def drafts_routes(state: State = None, as_json: Json = False) -> None:
    """Streams of traffic, and whose draft serves each."""
    from livedraft.cli.state import list_routes

    list_routes(state, as_json=as_json)


@drafts_app.command("close")
def drafts_close(
    route: Annotated[str, typer.Argument(help="As `drafts routes` shows it.")],
    state: State = None,
    as_json: Json = False,
) -> None:
    """Take a route's own draft out of service; the default route's serves its requests."""
    from livedraft.cli.state import close_route

    close_route(state, route, as_json=as_json)


@learn_app.command("status")
def learn_status(state: State = None, as_json: Json = False) -> None:
    """What is in service, what the trainer does, and what it costs."""
    from livedraft.cli.state import learn_status

    learn_status(state, as_json=as_json)


@learn_app.command("pause")
def learn_pause(state: State = None, as_json: Json = False) -> None:
    """Stop training; serving and the keeping of traces go on."""
    from livedraft import operations
    from livedraft.cli.state import act

    act(operations.set_paused, state, True, as_json=as_json)


@learn_app.command("resume")
def learn_resume(state: State = None, as_json: Json = False) -> None:
    """Train again."""
    from livedraft import operations
    from livedraft.cli.state import act

    act(operations.set_paused, state, False, as_json=as_json)


@learn_app.command("now")
def learn_now(state: State = None, as_json: Json = False) -> None:
    """Offer a candidate to the gate now instead of when one is due."""
    from livedraft import operations
    from livedraft.cli.state import act

    act(operations.learn_now, state, as_json=as_json)


@traces_app.command("list")
def traces_list(
    state: State = None,
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """The newest traces; no text."""
    from livedraft.cli.state import list_traces

    list_traces(state, limit=limit, as_json=as_json)


@traces_app.command("delete")
def traces_delete(
    user: Annotated[str | None, typer.Option(help="As the client sent it in `user`.")] = None,
    everybody: Annotated[bool, typer.Option("--all", help="Every trace there is.")] = False,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Delete the traces of a user, or all, from every file and from the running trainer."""
    from livedraft import operations
    from livedraft.cli.state import act
    from livedraft.records import UserError

    if (user is None) != everybody:
        raise UserError("Say whose traces: --user NAME, or --all.")
    act(operations.delete_traces, state, user, as_json=as_json)


@traces_app.command("export")
def traces_export(
    file: Annotated[Path, typer.Argument(help="Written; `-` is standard output for text formats.")],
    format: Annotated[
        str, typer.Option(help="openai, sharegpt, prompts, tokens or traces (with verdicts).")
    ] = "openai",
    model: Model = DEFAULT_MODEL,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Write traces to a file: text for other tools, token ids, or everything with the target's verdicts."""
    from livedraft.cli.exchange import export_traces

    export_traces(state, file, format=format, model=model, as_json=as_json)


@traces_app.command("import")
def traces_import(
    file: Annotated[Path, typer.Argument(help="OpenAI JSONL, ShareGPT, plain prompts, token ids, or exported traces.")],
    format: Annotated[str | None, typer.Option(help="Left out, the file's first line says.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer where the file has none.")] = 128,
    user: Annotated[str, typer.Option(help="Whose they are, for limits and deletion.")] = "import",
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Learn from what was served elsewhere: given answers are judged by the target, missing ones generated."""
    from livedraft.cli.exchange import import_traces

    import_traces(
        state, file, format=format, limit=limit, max_tokens=max_tokens, user=user, model=model, dtype=dtype, threads=threads,
        as_json=as_json,
    )  # fmt: skip
