"""`livedraft vllm`: vLLM serves, livedraft learns beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from livedraft.cli.options import ConfigFile, Json, State

app = typer.Typer(no_args_is_help=True, help="Serve with vLLM and learn beside it.")
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": False}


@app.callback()
def group() -> None:
    """Serve with vLLM and learn beside it."""


@app.command(context_settings=_PASSED_ON)
def serve(
    context: typer.Context,
    target: Annotated[str | None, typer.Argument(help="A Hugging Face folder, or a pulled name.")] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="The interpreter of the environment vLLM is installed in.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="auto, a draft's folder or a small model's; none or ngram: vLLM takes a learnt one later."),
    ] = None,
    state: State = None,
    replicas: Annotated[int | None, typer.Option(help="vLLM servers to start here.")] = None,
    attach: Annotated[
        list[str] | None, typer.Option(help="URL of a server started elsewhere; may be given several times.")
    ] = None,
    replica_key: Annotated[str | None, typer.Option(help="What attached servers show to send traces.")] = None,
    advertised_url: Annotated[str | None, typer.Option(help="Where attached servers reach this one.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Drafted in every round; default 3.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.")] = None,
    no_learn: Annotated[bool, typer.Option("--no-learn", help="Tap and store nothing.")] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default 8000; 0 takes a free one.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Opens /v1; may be given several times.")] = None,
    admin_key: Annotated[str | None, typer.Option(help="Opens /admin; without one it is closed.")] = None,
    config: ConfigFile = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Events and one line a request.")] = False,
) -> None:
    """Start vLLM, or attach to servers that run, and train a draft on what they serve. What follows -- is for vLLM."""
    from livedraft.settings import load_vllm_settings

    settings, vllm = load_vllm_settings(
        config,
        {
            "model": {
                "name": target, "draft": draft, "state": state and str(state), "learn": False if no_learn else None,
            },
            "engine": {"max_model_len": max_model_len},
            "server": {
                "host": host, "port": port, "served_model_name": served_model_name,
                "api_keys": tuple(api_key) if api_key else None, "admin_key": admin_key,
            },
            "vllm": {
                "python": python, "num_replicas": replicas, "attach": tuple(attach) if attach else None,
                "replica_key": replica_key, "advertised_url": advertised_url,
                "num_speculative_tokens": num_speculative_tokens, "arguments": tuple(context.args) or None,
            },
        },
    )  # fmt: skip
    from livedraft.cli.vllm_serve import run

    run(settings, vllm, is_verbose=verbose)


@app.command("probe")
def probe(
    python: Annotated[Path, typer.Argument(help="The interpreter of vLLM's environment.")], as_json: Json = False
) -> None:
    """Say whether the vLLM installed there can be used."""
    from livedraft.integrations.vllm.launch import look_at

    found = look_at(python)
    done = {"vllm": found.version, "device": "cpu" if found.is_cpu else "gpu", "supported": True}
    print(json.dumps(done) if as_json else f"vLLM {found.version} on {'CPU' if found.is_cpu else 'GPU'}: supported.")
