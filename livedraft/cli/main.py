"""The command line: a verb table. A verb's module is imported only when it is called, so `--help` is quick."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

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
