"""The verb table's part `livedraft bench ...`; a bench's module is imported only when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
from livedraft.config import LOSSES

bench_app = typer.Typer(help="Measure, on this machine, in one interleaved run.", no_args_is_help=True)


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


@bench_app.command("acceptance")
def bench_acceptance(
    prompts: Annotated[list[str], typer.Option(help="JSON lines; may be given several times.")],
    limit: Annotated[int, typer.Option(min=2, help="Prompts of each file.")] = 50,
    draft: Draft = "auto",
    before: Annotated[str | None, typer.Option(help="Another draft, to compare with on the same texts.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="May be given several times; default 0 and 1.")
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=16, help="Drafted tokens a round.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    state: State = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """How often a draft is accepted, by every definition in use, with intervals: in real speculative decoding and position by
    position."""
    from livedraft.bench.acceptance import run

    run(
        prompts=prompts, limit=limit, draft=draft, before=before, temperatures=temperature or [0.0, 1.0], seed=seed,
        k=num_speculative_tokens, max_tokens=max_tokens, state=state, model=model, dtype=dtype, threads=threads,
        as_json=as_json,
    )  # fmt: skip


@bench_app.command("proposers")
def bench_proposers(
    prompts: Annotated[list[str], typer.Option(help="JSON lines; may be given several times.")],
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each stream.")] = 12,
    topic: Annotated[list[str] | None, typer.Option(help="Streams are topics, and these of them.")] = None,
    second_turns: Annotated[bool, typer.Option("--second-turns", help="Ask second turns, as a stream.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    draft: Draft = "auto",
    state: State = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Plain decoding, suffixes alone, the draft alone and both, stream by stream."""
    from livedraft.bench.proposers import run

    run(
        prompts=prompts, limit=limit, topics=topic or [], second_turns=second_turns, max_tokens=max_tokens, draft=draft,
        temperature=temperature, state=state, model=model, dtype=dtype, threads=threads, as_json=as_json,
    )  # fmt: skip


@bench_app.command("distill")
def bench_distill(
    traces: Annotated[Path, typer.Option(help="Greedy responses, from `bench replay --save-traces`.")],
    sampled_traces: Annotated[Path | None, typer.Option(help="Responses at temperature 1, for the losses.")] = None,
    limit: Annotated[int, typer.Option(min=20, help="How many responses.")] = 400,
    seeds: Annotated[str, typer.Option(help="One number or several, with commas.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the responses.")] = 3,
    layers: Annotated[int, typer.Option(min=1, help="Of the draft.")] = 2,
    losses: Annotated[bool, typer.Option("--losses", help="Also every loss, one seed each.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of all runs; a killed study goes on there.")] = Path(
        "distill-study"
    ),
    threads: Threads = None,
    model: Model = DEFAULT_MODEL,
    as_json: Json = False,
) -> None:
    """Selective distillation against DistillSpec at equal steps, equal FLOPs and equal selected tokens; and the losses."""
    from livedraft.bench.distill import run
    from livedraft.device import num_available_cores, use_threads
    from livedraft.records import UserError

    use_threads(threads or num_available_cores())
    try:
        numbers = [int(number) for number in seeds.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds must be whole numbers with commas between them, got {seeds!r}.") from error
    run(
        traces=traces, sampled_traces=sampled_traces, limit=limit, seeds=numbers, epochs=epochs, layers=layers,
        losses=losses, out=out, model=model, as_json=as_json,
    )  # fmt: skip


@bench_app.command("compare")
def bench_compare(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `messages` or `turns`.")],
    limit: Annotated[int, typer.Option(min=1, help="Groups of prompts in a setting, each as large as the batch.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts answered together; may be given several times; default 1.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="0 is greedy; may be given several times; default 0.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times over all prompts.")] = 1,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's llama-server.")] = None,
    vllm_python: Annotated[Path | None, typer.Option(help="An interpreter that has vLLM.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the speeds as SVG.")] = None,
    draft: Draft = "auto",
    state: State = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    quantization: Annotated[str, typer.Option(help="Of livedraft's own target: none, int8 or int4.")] = "none",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """The same weights, draft and prompts through livedraft, transformers, llama.cpp and vLLM, interleaved."""
    from livedraft.bench.compare import run

    run(
        prompts, limit=limit, max_tokens=max_tokens, batches=batch or [1], temperatures=temperature or [0.0], rounds=rounds,
        draft=draft, state=state, model=model, dtype=dtype, quantization=quantization, threads=threads,
        llama_server=llama_server, vllm_python=vllm_python, plot=plot, as_json=as_json,
    )  # fmt: skip


@bench_app.command("limits")
def bench_limits(
    model: Model = DEFAULT_MODEL, dtype: Dtype = "auto", threads: Threads = None, as_json: Json = False
) -> None:
    """What this machine can do at best, and the share of it that each way to run a pass reaches."""
    from livedraft.bench.limits import run

    run(model=model, dtype=dtype, threads=threads, as_json=as_json)


@bench_app.command("growth")
def bench_growth(
    quantization: Annotated[str, typer.Option(help="Of the target's weights: none, int8 or int4.")] = "none",
    plot: Annotated[Path | None, typer.Option(help="Write the curves as SVG.")] = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time a token against context length and number of requests: no worse than linear in what must be read?"""
    from livedraft.bench.growth import run

    run(model=model, dtype=dtype, quantization=quantization, threads=threads, plot=plot, as_json=as_json)


@bench_app.command("unhelpful")
def bench_unhelpful(
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests together; may be given several times; default 1, 4 and 16."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=2, help="Groups of requests, each answered both ways.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of every answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; left out, the demo's plant shop.")] = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """What a draft of random weights costs beside plain decoding."""
    from livedraft.bench.unhelpful import run

    run(
        batches=batch or [1, 4, 16], pairs=pairs, max_tokens=max_tokens, temperature=temperature, prompts_path=prompts,
        model=model, dtype=dtype, threads=threads, as_json=as_json,
    )  # fmt: skip


@bench_app.command("gpu")
def bench_gpu(
    draft: Annotated[
        str, typer.Option(help="A learned draft's folder; left out, an untrained one, and its speed is not judged.")
    ] = "untrained",
    model: Model = DEFAULT_MODEL,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Everything promised of a GPU, in five minutes, table last. Runs without one too, in reduced sizes, and says so."""
    from livedraft.bench.gpu import run

    run(draft=draft, model=model, threads=threads, as_json=as_json)


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


@bench_app.command("lengths")
def bench_lengths(
    prompts: Annotated[list[str], typer.Option(help="JSON lines; may be given several times.")],
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file, from the whole of it.")] = 8,
    fixed: Annotated[str, typer.Option(help="Fixed lengths to compare with.")] = "1,2,3,4,6,8",
    together: Annotated[int, typer.Option(min=2, help="Requests served at once, in the second part.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    draft: Draft = "auto",
    state: State = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """The draft length that costs choose, beside every fixed one, over a mixed stream; and under load beside plain decoding."""
    from livedraft.bench.lengths import run
    from livedraft.records import UserError

    lengths = [int(part) for part in fixed.split(",") if part.strip().isdigit()]
    if not lengths or min(lengths) < 1 or max(lengths) > 16 or len(lengths) != len(fixed.split(",")):
        raise UserError(f"--fixed takes numbers from 1 to 16 with commas, such as 1,2,4; got {fixed!r}.")
    run(
        prompts=prompts, limit=limit, fixed=lengths, num_together=together, max_tokens=max_tokens, draft=draft, state=state,
        model=model, dtype=dtype, threads=threads, as_json=as_json,
    )  # fmt: skip


@bench_app.command("routes")
def bench_routes(
    prompts: Annotated[list[Path], typer.Option(help="JSON lines, one file a group of streams.")],
    limit: Annotated[int, typer.Option(min=8, help="Prompts of each file, from the whole of it.")] = 200,
    from_traces: Annotated[
        list[Path] | None, typer.Option(help="Their recorded responses; may be given several times.")
    ] = None,
    save_traces: Annotated[Path | None, typer.Option(help="Record the responses here.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the order and of training.")] = None,
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "auto",
    config: ConfigFile = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Several drafts against one at equal updates, on a mixed stream; and how well requests find the right one."""
    settings = settings_of(config, learning={"seed": seed})
    from livedraft.bench.routes import run
    from livedraft.device import num_available_cores, use_threads

    use_threads(threads or num_available_cores())
    run(
        prompt_files=prompts, limit=limit, from_traces=from_traces or [], save_traces=save_traces, max_tokens=max_tokens,
        model=model, dtype=dtype, learning=settings.learning, routing=settings.routing, as_json=as_json,
    )  # fmt: skip


@bench_app.command("replay")
def bench_replay(
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines; may be given several times.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 800,
    shift: Annotated[bool, typer.Option("--shift", help="At the end return to the first file's next prompts.")] = False,
    mix: Annotated[bool, typer.Option("--mix", help="All files' prompts in random order.")] = False,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="livedraft, osd, static:INIT, static:30% or static:FOLDER; may be given several times."),
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
    loss: Annotated[str | None, typer.Option(help=f"One of {', '.join(LOSSES)}.")] = None,
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
    settings = settings_of(
        config,
        learning={"seed": seed, "loss": loss, "learning_rate": learning_rate, "select_fraction": select_fraction},
    )
    from livedraft.bench.replay import run

    run(
        prompt_files=prompts or [], limit=limit, shift=shift, mix=mix, arms=arm or ["livedraft"], concurrency=concurrency,
        max_tokens=max_tokens, temperature=temperature, save_traces=save_traces, from_traces=from_traces or [], plot=plot,
        state=state, model=model, dtype=dtype, learning=settings.learning, as_json=as_json,
    )  # fmt: skip


@bench_app.command("table")
def bench_table(
    folder: Annotated[
        Path, typer.Argument(help="Of .json files: what those three benches print with --json, a file each.")
    ],
    write: Annotated[
        Path | None, typer.Option(help="A Markdown file, to put the table between its two markers instead.")
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="The main rows alone, as README has them.")] = False,
    as_json: Json = False,
) -> None:
    """Results of `bench distill`, `bench replay` and `distill` as one Markdown table: this is how README's is made."""
    from livedraft.bench.results import run

    run(folder, is_brief=brief, write=write, as_json=as_json)


@bench_app.command("scale")
def bench_scale(
    replicas: Annotated[str, typer.Option(help="vLLM servers, with commas between.")] = "1,10,1000",
    hours: Annotated[float, typer.Option(min=0.1, help="Simulated time.")] = 2.0,
    replica_tokens_per_second: Annotated[float | None, typer.Option(help="Of one server.")] = None,
    bytes_per_token: Annotated[float | None, typer.Option(help="Tapped.")] = None,
    learner_tokens_per_second: Annotated[float | None, typer.Option(help="Trained.")] = None,
    version_bytes: Annotated[float | None, typer.Option(help="Of a draft as servers fetch it.")] = None,
    fetches_together: Annotated[int | None, typer.Option(min=1, help="Servers swapped at the same time.")] = None,
    as_json: Json = False,
) -> None:
    """A paper plan from measured figures: traffic, load and staleness with many vLLM servers and one learner."""
    from livedraft.bench.scale import run

    try:
        counts = [int(count) for count in replicas.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--replicas takes numbers with commas between, got {replicas!r}.") from error
    if min(counts) < 1:
        raise typer.BadParameter("--replicas takes numbers of at least 1.")
    changes = {
        "replica_tokens_per_second": replica_tokens_per_second, "bytes_per_token": bytes_per_token,
        "learner_tokens_per_second": learner_tokens_per_second, "version_bytes": version_bytes,
        "fetches_together": fetches_together,
    }  # fmt: skip
    run(counts, changes, hours=hours, as_json=as_json)
