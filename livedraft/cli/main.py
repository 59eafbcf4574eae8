"""The command line: a verb table. A verb's module is imported only when it is called, so `--help` is quick."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from livedraft import __version__
from livedraft.cli.bench_verbs import bench_app
from livedraft.cli.options import (
    DEFAULT_MODEL,
    ConfigFile,
    Draft,
    Dtype,
    Json,
    Model,
    NumSpeculative,
    State,
    Threads,
    settings_of,
)  # fmt: skip
from livedraft.cli.state_verbs import drafts_app, learn_app, traces_app
from livedraft.cli.vllm import app as vllm_app
from livedraft.config import LOSSES, OSD_SETTINGS

app = typer.Typer(
    help="Speculative decoding whose draft models learn from the traffic they serve.",
    epilog="Exit codes: 0 done, 1 refused or failed (one sentence says why), 2 not understood, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Settings: defaults < file < environment < flags.", no_args_is_help=True)
_GROUPS = {
    "bench": bench_app, "config": config_app, "drafts": drafts_app, "learn": learn_app, "traces": traces_app,
    "vllm": vllm_app,
}  # fmt: skip
for name, group in _GROUPS.items():
    app.add_typer(group, name=name)

# None means "not given": the file, the environment or the default decides.
OptDraft = Annotated[str | None, typer.Option(help="auto, none, untrained, a version id, or a folder.")]
OptDtype = Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")]
Learn = Annotated[
    str | None,
    typer.Option(
        help="off, gentle, on or eager: whether traces are kept and how much training may take; default gentle."
    ),
]
NoLearn = Annotated[bool, typer.Option("--no-learn", help="The same as --learn off.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
]


@app.callback()
def before_any_verb(version: Version = False) -> None:
    pass


@app.command()
def pull(name: Annotated[str, typer.Argument(help="Which model.")] = DEFAULT_MODEL, as_json: Json = False) -> None:
    """Get a model once; checked by its checksum."""
    from livedraft.models.pull import pull as pull_model

    path = str(pull_model(name))
    print(json.dumps({"model": name, "path": path}) if as_json else path)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message (or plain text with --raw).")],
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 switches it off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 switches it off.")] = 0,
    min_p: Annotated[float, typer.Option(help="0 switches it off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer reproducible.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")] = False,
    draft: Draft = "auto",
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Fixed draft length; left out, costs decide.")
    ] = None,
    state: State = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Answer one prompt; plain (`--draft none`) and speculative answers are the same."""
    from livedraft.cli.generate import run

    run(
        prompt,
        model=model,
        sampling={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "seed": seed,
        },
        is_raw=raw,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
        state=state,
        dtype=dtype,
        threads=threads,
        as_json=as_json,
    )


@app.command("export-target")
def export_target(
    file: Annotated[Path, typer.Argument(help="The GGUF file, or with --format hf the folder, to write.")],
    format: Annotated[str, typer.Option(help="gguf, or hf: a Hugging Face folder in bf16.")] = "gguf",
    type: Annotated[str, typer.Option(help="bf16 or f32, of a GGUF file.")] = "bf16",
    model: Model = DEFAULT_MODEL,
    as_json: Json = False,
) -> None:
    """Write a GGUF target's weights in one plain type, for other engines to run the same model."""
    if format not in ("gguf", "hf"):
        raise typer.BadParameter(f"--format must be gguf or hf, got {format!r}.")
    if format == "hf":
        from livedraft.export import export_target as export_folder

        if type != "bf16":
            raise typer.BadParameter("--format hf writes bf16; leave --type out.")
        config = export_folder(model, file)
        said = f"{config.family} with {config.num_layers} layers written to {file} as bf16."
        done = {"folder": str(file), "family": config.family, "num_layers": config.num_layers, "type": "bf16"}
        print(json.dumps(done) if as_json else said)
        return
    from livedraft.models.export_gguf import export_gguf

    count = export_gguf(model, file, type=type)
    done = {"file": str(file), "num_tensors": count, "type": type}
    print(json.dumps(done) if as_json else f"{count} tensors written to {file} as {type}.")


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="A pulled name, a Hugging Face folder, or a .gguf file.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Default 8000; 0 takes a free one.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Opens /v1; may be given several times.")] = None,
    admin_key: Annotated[str | None, typer.Option(help="Opens /admin; without one it is closed.")] = None,
    draft: OptDraft = None,
    learn: Learn = None,
    no_learn: NoLearn = False,
    learner: Annotated[
        str, typer.Option(help="livedraft, or osd: Online Speculative Decoding's own variant.")
    ] = "livedraft",
    memory_only: Annotated[
        bool | None, typer.Option("--memory-only", help="Traces live in memory and are gone at the end.")
    ] = None,
    state: State = None,
    num_speculative_tokens: NumSpeculative = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most requests decoded together.")] = None,
    max_model_len: MaxModelLen = None,
    max_queue: Annotated[int | None, typer.Option(help="Completions that may wait for a slot.")] = None,
    per_request_metrics: Annotated[
        bool | None, typer.Option("--per-request-metrics", help="Speculation counts in every response.")
    ] = None,
    dtype: OptDtype = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="none, int8 (half the bytes; answers differ a little) or int4 (a GGUF file's own)."),
    ] = None,
    threads: Threads = None,
    config: ConfigFile = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Events and one line a request on standard error.")
    ] = False,
) -> None:
    """Serve OpenAI's API: continuous batching, speculation, and a draft that learns from what is served."""
    level = "off" if no_learn else learn
    learning = dict(OSD_SETTINGS) if learner == "osd" else {}
    if learner not in ("livedraft", "osd"):
        raise ValueError(f"--learner must be livedraft or osd, got {learner!r}.")
    learning |= {"level": None if level == "off" else level, "memory_only": memory_only}
    settings = settings_of(  # first: a wrong setting should not cost the seconds torch takes to import
        config,
        model={
            "name": model, "draft": draft, "learn": None if level is None else level != "off",
            "state": state and str(state), "dtype": dtype, "quantization": quantization, "num_threads": threads,
        },
        speculation={"num_speculative_tokens": num_speculative_tokens},
        learning=learning,
        engine={"max_num_seqs": max_num_seqs, "max_model_len": max_model_len},
        server={
            "host": host, "port": port, "served_model_name": served_model_name,
            "api_keys": tuple(api_key) if api_key else None, "admin_key": admin_key, "max_queue": max_queue,
            "per_request_metrics": per_request_metrics,
        },
    )  # fmt: skip
    from livedraft.cli.serve import run

    run(settings, is_verbose=verbose)


@app.command()
def chat(
    model: Annotated[str | None, typer.Argument(help="Loaded here, unless --url names a server.")] = None,
    url: Annotated[str | None, typer.Option(help="Attach to a server, such as http://127.0.0.1:8000.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the server.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    stats: Annotated[bool, typer.Option("--stats", help="After each answer: tokens/s, acceptance, draft.")] = False,
    draft: OptDraft = None,
    state: State = None,
    dtype: OptDtype = None,
    threads: Threads = None,
    config: ConfigFile = None,
) -> None:
    """Talk to a model: a running server's, or one loaded here. Ends with Ctrl-D; nothing is stored or learned from."""
    settings = settings_of(
        config,
        model={"name": model, "draft": draft, "state": state and str(state), "dtype": dtype, "num_threads": threads},
    )
    from livedraft.cli.chat import run

    run(
        settings, url=url, api_key=api_key, system=system, temperature=temperature, max_tokens=max_tokens,
        prints_stats=stats,
    )  # fmt: skip


@app.command()
def distill(
    prompts: Annotated[
        str | None, typer.Option(help="JSON lines, or hub:DATASET:CONFIG:SPLIT:COLUMN[:COLUMN].")
    ] = None,
    traces: Annotated[str | None, typer.Option(help="Responses recorded before, instead of prompts.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="TOML file with [run] and [distill]; flags go over it.")] = None,
    target: Annotated[str | None, typer.Option(help="A pulled name, folder, .gguf file, or hub name.")] = None,
    draft: Annotated[str | None, typer.Option(help="auto, a draft's folder, or a small model.")] = None,
    draft_layers: Annotated[int | None, typer.Option(help="Of an auto draft.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run; a killed one goes on there.")] = None,
    limit: Annotated[int | None, typer.Option(help="How many prompts.")] = None,
    method: Annotated[str | None, typer.Option(help="distillspec or adaspec.")] = None,
    loss: Annotated[str | None, typer.Option(help=f"One of {', '.join(LOSSES)}.")] = None,
    jsd_beta: Annotated[float | None, typer.Option(help="Of the loss jsd: the target's share of the mixture.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the responses.")] = None,
    reference_epochs: Annotated[int | None, typer.Option(help="Of the reference; as many if left out.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Requests a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its highest.")] = None,
    select_fraction: Annotated[float | None, typer.Option(help="Share of the positions AdaSPEC keeps.")] = None,
    select: Annotated[str | None, typer.Option(help="top, bottom or random.")] = None,
    source: Annotated[str | None, typer.Option(help="Whose texts: target, student or mix.")] = None,
    mix_level: Annotated[str | None, typer.Option(help="request or token.")] = None,
    teacher: Annotated[str | None, typer.Option(help="top: 64 tokens a position; full: all.")] = None,
    responses: Annotated[str | None, typer.Option(help="generated, or given in the prompt file.")] = None,
    reference: Annotated[str | None, typer.Option(help="A distilled draft's folder, as AdaSPEC's reference.")] = None,
    finetune_target: Annotated[
        str | None, typer.Option(help="First train the target on this file's responses.")
    ] = None,
    finetune_epochs: Annotated[int | None, typer.Option(help="Passes of that over the responses.")] = None,
    finetune_learning_rate: Annotated[float | None, typer.Option(help="Of that, at its start.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Responses are drawn at.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest response.")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Keep the draft of every so many steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes order and draws.")] = None,
    dtype: OptDtype = None,
    threads: Threads = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="Also log to Weights & Biases.")] = False,
    as_json: Json = False,
) -> None:
    """Make a good draft before the first request: DistillSpec, then AdaSPEC. Under torchrun, on several devices."""
    from livedraft.settings import load_recipe

    run_config, config = load_recipe(
        recipe,
        {
            "run": {
                "prompts": prompts, "traces": traces, "target": target, "draft": draft, "draft_layers": draft_layers,
                "out": out, "limit": limit, "responses": responses, "reference": reference, "dtype": dtype,
                "finetune_target": finetune_target, "finetune_epochs": finetune_epochs,
                "finetune_learning_rate": finetune_learning_rate, "threads": threads,
            },
            "distill": {
                "method": method, "loss": loss, "jsd_beta": jsd_beta, "epochs": epochs, "batch_size": batch_size,
                "reference_epochs": reference_epochs, "learning_rate": learning_rate, "select_fraction": select_fraction,
                "select": select, "source": source, "mix_level": mix_level, "teacher": teacher,
                "temperature": temperature, "max_tokens": max_tokens, "save_steps": save_steps, "seed": seed,
            },
        },
    )  # fmt: skip
    from livedraft.cli.distill import run

    run(run_config, config, use_wandb=wandb, as_json=as_json)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A pulled name, a Hugging Face folder, or a .gguf file.")] = None,
    host: Annotated[str | None, typer.Option(help="Address `serve` would listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port `serve` would listen on.")] = None,
    state: State = None,
    threads: Threads = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Say what is missing or slow on this machine, and the command that mends it. Exit code 1 only if `serve` would fail."""
    settings = settings_of(
        config,
        model={"name": model, "state": state and str(state), "num_threads": threads},
        server={"host": host, "port": port},
    )
    from livedraft.cli.doctor import run

    sys.exit(run(settings, as_json=as_json))


@config_app.command("show")
def config_show(config: ConfigFile = None, as_json: Json = False) -> None:
    """What a server started here would use, file and environment included."""
    from livedraft.cli.config import show

    show(settings_of(config), as_json=as_json)


@config_app.command("reference")
def config_reference() -> None:
    """Every setting with type, default and meaning, as Markdown: this is how docs/configuration.md is made."""
    from livedraft.cli.config import reference

    print(reference(), end="")


@app.command()
def demo(
    requests: Annotated[int, typer.Option(min=40, max=400, help="Length of the stream.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=16, max=256, help="Longest answer, in tokens.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Fixes the prompts and the training.")] = 0,
    state: State = None,
    model: Model = DEFAULT_MODEL,
    opens_page: Annotated[bool, typer.Option("--open", help="Show it on the dashboard too, in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a stream of prompts and watch a draft learn it, live."""
    from livedraft.cli.demo import run

    run(
        num_requests=requests, max_tokens=max_tokens, seed=seed, state=state, model=model, as_json=as_json,
        opens_page=opens_page,
    )  # fmt: skip


def main() -> None:
    """Entry point, but for Ctrl-C (`__main__`): an error of the user's is one sentence on standard error and exit code 1, never
    a traceback."""
    from livedraft.records import UserError

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("livedraft.start").setLevel(logging.INFO)
    try:
        app(prog_name="livedraft")
    except (UserError, ValueError) as error:
        print(f"livedraft: {error}", file=sys.stderr)
        sys.exit(1)
    except MemoryError:
        print("livedraft: not enough memory; lower max_num_seqs or use a smaller model.", file=sys.stderr)
        sys.exit(1)
