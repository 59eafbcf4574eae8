"""The command line: a verb table. A verb's module is imported only when it is called, so `--help` is quick."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from livedraft.config import OSD_SETTINGS

if TYPE_CHECKING:
    from livedraft.settings import Settings

app = typer.Typer(
    help="Speculative decoding whose draft models learn from the traffic they serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure, on this machine, in one interleaved run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Model = Annotated[str, typer.Option(help="A pulled name, a Hugging Face folder, or a .gguf file.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output; logs go to standard error.")
]
State = Annotated[Path | None, typer.Option(help="Folder of drafts and traces.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the serving process; default all cores.")]
Draft = Annotated[str, typer.Option(help="auto, none, untrained, a version id, or a draft's or small model's folder.")]
DEFAULT_MODEL = "smollm2-135m"


@app.command()
def pull(name: Annotated[str, typer.Argument(help="Which model.")] = DEFAULT_MODEL) -> None:
    """Get a model once; checked by its checksum."""
    from livedraft.models.pull import pull as pull_model

    print(pull_model(name))


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
    file: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    type: Annotated[str, typer.Option(help="bf16 or f32.")] = "bf16",
    model: Model = DEFAULT_MODEL,
) -> None:
    """Write a GGUF target's weights in one plain type, for other engines to run the same model."""
    from livedraft.models.export_gguf import export_gguf

    print(f"{export_gguf(model, file, type=type)} tensors written to {file} as {type}.")


config_app = typer.Typer(help="Settings: defaults < file < environment < flags.", no_args_is_help=True)
app.add_typer(config_app, name="config")
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with [model], [engine], [speculation], [learning], [server].")
]
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
NumSpeculative = Annotated[int | None, typer.Option(help="Fixed draft length; left out, costs decide.")]


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
        typer.Option(help="none or int8: the target's weights in half the bytes; its answers differ a little."),
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
        raise typer.BadParameter(f"--learner must be livedraft or osd, got {learner!r}.")
    learning |= {"level": None if level == "off" else level, "memory_only": memory_only}
    settings = _settings(  # first: a wrong setting should not cost the seconds torch takes to import
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
    settings = _settings(
        config,
        model={"name": model, "draft": draft, "state": state and str(state), "dtype": dtype, "num_threads": threads},
    )
    from livedraft.cli.chat import run

    run(
        settings, url=url, api_key=api_key, system=system, temperature=temperature, max_tokens=max_tokens,
        prints_stats=stats,
    )  # fmt: skip


@config_app.command("show")
def config_show(config: ConfigFile = None, as_json: Json = False) -> None:
    """What a server started here would use, file and environment included."""
    from livedraft.cli.config import show

    show(_settings(config), as_json=as_json)


def _settings(file: Path | None, **flags: dict[str, Any]) -> Settings:
    from livedraft.settings import load_settings

    return load_settings(file, flags)


drafts_app = typer.Typer(help="Versions of the draft: look, promote, go back.", no_args_is_help=True)
learn_app = typer.Typer(help="The training beside serving: look, pause, resume, now.", no_args_is_help=True)
traces_app = typer.Typer(help="What is kept of served requests: look, delete.", no_args_is_help=True)
for name, group in {"drafts": drafts_app, "learn": learn_app, "traces": traces_app}.items():
    app.add_typer(group, name=name)
VersionId = Annotated[str, typer.Argument(help="As `drafts list` shows it.")]


@drafts_app.command("list")
def drafts_list(state: State = None, as_json: Json = False) -> None:
    """Every version with what the gate measured."""
    from livedraft.cli.state import list_drafts

    list_drafts(state, as_json=as_json)


@drafts_app.command("show")
def drafts_show(version: VersionId, state: State = None) -> None:
    """One version: where it comes from, its data, the gate's numbers. JSON."""
    from livedraft.cli.state import show_draft

    show_draft(state, version)


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
) -> None:
    """A version as a whole model for other engines, with the target's full vocabulary and a card that says where it is from."""
    from livedraft.cli.state import export_draft

    export_draft(state, version, path, format=format, model=model)


@drafts_app.command("import")
def drafts_import(
    folder: Annotated[
        Path, typer.Argument(help="A version's folder: draft.safetensors, and manifest.json if there is one.")
    ],
    model: Model = DEFAULT_MODEL,
    state: State = None,
) -> None:
    """Take in a version trained elsewhere for the same target; `drafts promote` puts it into service."""
    from livedraft.cli.state import import_draft

    import_draft(state, folder, model=model)


@drafts_app.command("promote")
def drafts_promote(version: VersionId, state: State = None) -> None:
    """Put a version into service, whatever the gate said; the watch still compares it with the one before."""
    from livedraft.cli.state import promote_draft

    promote_draft(state, version)


@drafts_app.command("rollback")
def drafts_rollback(state: State = None) -> None:
    """Withdraw the canary or, without one, go back to the version before; training goes on from there."""
    from livedraft.cli.state import roll_back

    roll_back(state)


@learn_app.command("status")
def learn_status(state: State = None, as_json: Json = False) -> None:
    """What is in service, what the trainer does, and what it costs."""
    from livedraft.cli.state import learn_status

    learn_status(state, as_json=as_json)


@learn_app.command("pause")
def learn_pause(state: State = None) -> None:
    """Stop training; serving and the keeping of traces go on."""
    from livedraft import operations
    from livedraft.cli.state import say

    say(operations.set_paused, state, True)


@learn_app.command("resume")
def learn_resume(state: State = None) -> None:
    """Train again."""
    from livedraft import operations
    from livedraft.cli.state import say

    say(operations.set_paused, state, False)


@learn_app.command("now")
def learn_now(state: State = None) -> None:
    """Offer a candidate to the gate now instead of when one is due."""
    from livedraft import operations
    from livedraft.cli.state import say

    say(operations.learn_now, state)


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
) -> None:
    """Delete the traces of a user, or all, from every file and from the running trainer."""
    from livedraft import operations
    from livedraft.cli.state import say
    from livedraft.records import UserError

    if (user is None) != everybody:
        raise UserError("Say whose traces: --user NAME, or --all.")
    say(operations.delete_traces, state, user)


@traces_app.command("export")
def traces_export(
    file: Annotated[Path, typer.Argument(help="Written; `-` is standard output for text formats.")],
    format: Annotated[
        str, typer.Option(help="openai, sharegpt, prompts, tokens or traces (with verdicts).")
    ] = "openai",
    model: Model = DEFAULT_MODEL,
    state: State = None,
) -> None:
    """Write traces to a file: text for other tools, token ids, or everything with the target's verdicts."""
    from livedraft.cli.exchange import export_traces

    export_traces(state, file, format=format, model=model)


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
) -> None:
    """Learn from what was served elsewhere: given answers are judged by the target, missing ones generated."""
    from livedraft.cli.exchange import import_traces

    import_traces(
        state, file, format=format, limit=limit, max_tokens=max_tokens, user=user, model=model, dtype=dtype, threads=threads,
    )  # fmt: skip


@app.command()
def demo(
    requests: Annotated[int, typer.Option(min=40, max=400, help="Length of the stream.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=16, max=256, help="Longest answer, in tokens.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Fixes the prompts and the training.")] = 0,
    state: State = None,
    model: Model = DEFAULT_MODEL,
    as_json: Json = False,
) -> None:
    """Serve a stream of prompts and watch a draft learn it, live."""
    from livedraft.cli.demo import run

    run(num_requests=requests, max_tokens=max_tokens, seed=seed, state=state, model=model, as_json=as_json)


@bench_app.command("speed")
def bench_speed(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `messages` or `turns`.")],
    limit: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    draft: Draft = "auto",
    state: State = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Tokens a second at batch 1: plain, speculative, and transformers' generate with the same weights."""
    from livedraft.bench.speed import run

    run(
        prompts, limit=limit, max_tokens=max_tokens, draft=draft, state=state, model=model, dtype=dtype,
        threads=threads, as_json=as_json,
    )  # fmt: skip


@bench_app.command("compare")
def bench_compare(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `messages` or `turns`.")],
    limit: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times over all prompts.")] = 1,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's llama-server.")] = None,
    llama_draft: Annotated[Path | None, typer.Option(help="A draft for it, as GGUF.")] = None,
    assistant: Annotated[Path | None, typer.Option(help="A draft for transformers, as a Hugging Face folder.")] = None,
    draft: Draft = "auto",
    state: State = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """The same weights and prompts through livedraft, transformers and llama.cpp, in one interleaved run."""
    from livedraft.bench.compare import run

    run(
        prompts, limit=limit, max_tokens=max_tokens, temperature=temperature, rounds=rounds, draft=draft, state=state,
        model=model, dtype=dtype, threads=threads, llama_server=llama_server, llama_draft=llama_draft, assistant=assistant,
        as_json=as_json,
    )  # fmt: skip


@bench_app.command("limits")
def bench_limits(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    plot: Annotated[Path | None, typer.Option(help="Write the growth of costs as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """What this machine can do at best, and the share of it that each way to run a pass reaches."""
    from livedraft.bench.limits import run

    run(model=model, dtype=dtype, threads=threads, plot=plot, as_json=as_json)


@bench_app.command("serve")
def bench_serve(
    concurrency: Annotated[str, typer.Option(help="Numbers of clients, with commas.")] = "1,4,16",
    requests: Annotated[int, typer.Option(min=1, help="Requests a client in each round.")] = 1,
    rounds: Annotated[int, typer.Option(min=2, help="Alternations of direct, plain and speculative.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of every answer, in tokens.")] = 64,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; left out, the demo's plant shop.")] = None,
    draft: Draft = "auto",
    state: State = None,
    num_speculative_tokens: NumSpeculative = None,
    compare_learning: Annotated[
        bool,
        typer.Option(
            "--compare-learning", help="Instead: latency with the trainer running and paused, at steady load."
        ),
    ] = False,
    level: Annotated[str, typer.Option(help="With --compare-learning: gentle, on or eager.")] = "gentle",
    load: Annotated[float, typer.Option(min=0.05, max=1, help="With --compare-learning: share of the capacity.")] = 0.7,
    windows: Annotated[int, typer.Option(min=1, help="With --compare-learning: windows a side.")] = 4,
    window_seconds: Annotated[float, typer.Option(min=1, help="With --compare-learning: length of one.")] = 60.0,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Over HTTP: tokens a second, time to first token and between pieces, with and without speculation."""
    if compare_learning:
        from livedraft.bench.interference import run as run_interference

        run_interference(
            level=level, load=load, windows=windows, window_seconds=window_seconds, max_tokens=max_tokens,
            prompts_path=prompts, model=model, dtype=dtype, threads=threads, as_json=as_json,
        )  # fmt: skip
        return
    from livedraft.bench.serve import run
    from livedraft.records import UserError

    clients = [int(part) for part in concurrency.split(",") if part.strip().isdigit()]
    if not clients or min(clients) < 1 or len(clients) != len(concurrency.split(",")):
        raise UserError(f"--concurrency takes numbers of clients with commas, such as 1,4,16; got {concurrency!r}.")
    run(
        concurrency=clients, requests_per_client=requests, num_rounds=rounds, max_tokens=max_tokens,
        prompts_path=prompts, draft=draft, state=state, model=model, dtype=dtype, threads=threads,
        num_speculative_tokens=num_speculative_tokens, as_json=as_json,
    )  # fmt: skip


@bench_app.command("replay")
def bench_replay(
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines; may be given several times.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 800,
    shift: Annotated[bool, typer.Option("--shift", help="At the end return to the first file's next prompts.")] = False,
    mix: Annotated[bool, typer.Option("--mix", help="All files' prompts in random order.")] = False,
    arm: Annotated[
        list[str] | None, typer.Option(help="livedraft, osd, static:INIT or static:FOLDER; may be given several times.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests served together.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    save_traces: Annotated[Path | None, typer.Option(help="Record the served requests here.")] = None,
    from_traces: Annotated[
        list[Path] | None, typer.Option(help="Rerun the arms on recorded requests; may be given several times.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves as SVG.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of training and mixing.")] = None,
    loss: Annotated[str | None, typer.Option(help="forward_kl, neg_log_alpha or hybrid.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the trainer; left out, it chooses.")] = None,
    select_fraction: Annotated[float | None, typer.Option(help="AdaSPEC: share of the positions that teach.")] = None,
    state: State = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Learning curves: serve prompts and learn from them, live or recorded, beside OSD's own variant and static drafts.

    Without the arm livedraft the prompts are only served and recorded, plainly and in large batches.
    """
    settings = _settings(
        config,
        learning={"seed": seed, "loss": loss, "learning_rate": learning_rate, "select_fraction": select_fraction},
    )
    from livedraft.bench.replay import run

    run(
        prompt_files=prompts or [], limit=limit, shift=shift, mix=mix, arms=arm or ["livedraft"], concurrency=concurrency,
        max_tokens=max_tokens, temperature=temperature, save_traces=save_traces, from_traces=from_traces or [], plot=plot,
        state=state, model=model, dtype=dtype, learning=settings.learning, as_json=as_json,
    )  # fmt: skip


def main() -> None:
    """Entry point: an error of the user's is one sentence on standard error and exit code 1, never a traceback."""
    from livedraft.records import UserError

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        app()
    except (UserError, ValueError) as error:
        print(f"livedraft: {error}", file=sys.stderr)
        sys.exit(1)
    except MemoryError:
        print("livedraft: not enough memory; lower max_num_seqs or use a smaller model.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
