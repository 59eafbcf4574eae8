"""`livedraft bench serve`: the real server over HTTP, with and without speculation, and the engine called directly.

Closed loops of 1, 4, 16 ... clients. Every round runs the three ways in rotating order on the same prompts, so a shared
machine's noise falls on all alike. Learning is off, and no finished request's prefix is kept: a prompt must not be cheaper for
who comes second. `itl` is the gap between two streamed pieces; with speculation a piece may hold several tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import numpy as np

from livedraft.bench.alternate import median_with_lower_bound
from livedraft.bench.demo_stream import plant_shop_prompts
from livedraft.bench.http_client import Streamed, StreamingClient
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_prompts
from livedraft.config import EngineConfig, SpeculationConfig
from livedraft.llm import LLM
from livedraft.records import SamplingParams, UserError
from livedraft.tokenizer import Message

_WAYS = ("direct", "plain", "speculative")
"""direct: the engine without speculation and without HTTP."""


@dataclass(kw_only=True)
class _Measured:
    tokens_per_second: list[float] = field(default_factory=list)
    """One a round."""
    answers: list[Streamed] = field(default_factory=list)


def run(
    *,
    concurrency: list[int],
    requests_per_client: int,
    num_rounds: int,
    max_tokens: int,
    prompts_path: Path | None,
    draft: str,
    state: Path | None,
    model: str,
    dtype: str,
    threads: int | None,
    num_speculative_tokens: int | None,
    as_json: bool,
) -> None:
    most = max(concurrency)
    prompts = bench_prompts(prompts_path, most * requests_per_client * num_rounds)
    config = EngineConfig(max_num_seqs=most, num_prefix_slots=0)
    speculation = SpeculationConfig(num_speculative_tokens=num_speculative_tokens)
    with (
        LLM(
            model, draft=draft, state=state, dtype=dtype, num_threads=threads, engine=config, speculation=speculation
        ) as llm,
        running_server(
            model,
            _server_options(draft, llm.engine.draft_version, state, most, num_speculative_tokens),
            dtype=dtype,
            threads=threads,
        ) as address,
    ):
        rows, bar = [], Bar()
        for clients in concurrency:
            measured: dict[str, _Measured] = {way: _Measured() for way in _WAYS}
            chosen = itertools.cycle(prompts)
            for number in range(-1, num_rounds):  # round -1 warms caches and connections up
                batch = list(itertools.islice(chosen, clients * (1 if number < 0 else requests_per_client)))
                for way in _WAYS[number % 3 :] + _WAYS[: number % 3]:
                    bar(f"rounds of {clients} clients, {way:<12}", number + 1, num_rounds + 1)
                    one = _round(way, llm, address, batch, clients, max_tokens)
                    if number >= 0:
                        measured[way].tokens_per_second += one.tokens_per_second
                        measured[way].answers += one.answers
            rows.append(_row(clients, measured))
        result = {
            "execution": llm.path.description,
            "draft_version": llm.engine.draft_version,
            "max_tokens": max_tokens,
            "rounds": num_rounds,
            "rows": rows,
        }
    bar.stop()
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(result)


def _server_options(
    draft: str, draft_version: str, state: Path | None, max_num_seqs: int, num_speculative_tokens: int | None
) -> list[str]:
    if state is not None and draft == "auto" and draft_version not in ("none", "untrained"):
        draft = str(state / "drafts" / draft_version)  # the state folder has one owner, and that is this process
    options = ["--no-learn", "--max-num-seqs", str(max_num_seqs), "--draft", draft]
    if num_speculative_tokens is not None:
        options += ["--num-speculative-tokens", str(num_speculative_tokens)]
    return options


def bench_prompts(path: Path | None, count: int) -> list[list[Message]]:
    if path is not None:
        return read_prompts(path, count)
    return [[{"role": "user", "content": prompt}] for prompt in plant_shop_prompts(min(count, 400), seed=1)]


def _round(
    way: str, llm: LLM, address: tuple[str, int, str], prompts: list[list[Message]], clients: int, max_tokens: int
) -> _Measured:
    started = time.perf_counter()
    if way == "direct":
        num_tokens, answers = _direct(llm, prompts, clients, max_tokens), []
    else:
        answers = asyncio.run(_over_http(address, prompts, clients, max_tokens, is_plain=way == "plain"))
        num_tokens = sum(answer.num_tokens for answer in answers)
    return _Measured(tokens_per_second=[num_tokens / (time.perf_counter() - started)], answers=answers)


def _direct(llm: LLM, prompts: list[list[Message]], clients: int, max_tokens: int) -> int:
    """The same closed loop without HTTP: as one request ends the next begins."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    left = iter(prompts)
    num_tokens = 0

    def fill(num_places: int) -> None:
        for messages in itertools.islice(left, num_places):
            request = llm.request(messages, sampling, store=False)
            llm.engine.add_request(replace(request, num_speculative_tokens=0))

    fill(clients)
    while llm.engine.has_work:
        finished = llm.engine.step()
        num_tokens += sum(state.num_output_tokens for state in finished)
        fill(len(finished))
    return num_tokens


async def _over_http(
    address: tuple[str, int, str], prompts: list[list[Message]], clients: int, max_tokens: int, *, is_plain: bool
) -> list[Streamed]:
    host, port, name = address
    left = iter(prompts)
    answers: list[Streamed] = []

    async def client() -> None:
        connection = StreamingClient(host, port)
        for messages in left:  # shared by all clients: a closed loop each
            body = {
                "model": name, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "store": False,  # the same prompt comes again: its answer must not be found in the traffic
            }  # fmt: skip
            answers.append(await connection.chat(body | ({"num_speculative_tokens": 0} if is_plain else {})))
        await connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


@contextlib.contextmanager
def running_server(
    model: str, options: list[str], *, dtype: str, threads: int | None
) -> Iterator[tuple[str, int, str]]:
    """`livedraft serve` as a process of its own, no prefix kept; yields host, port and model name."""
    command = [sys.executable, "-m", "livedraft", "serve", model, "--port", "0", "--dtype", dtype, *options]
    command += ["--served-model-name", "bench"]
    if threads is not None:
        command += ["--threads", str(threads)]
    environment = {**os.environ, "LIVEDRAFT_ENGINE__NUM_PREFIX_SLOTS": "0"}
    with tempfile.TemporaryFile("w+") as errors:  # not a pipe: nobody reads while it runs
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            yield ("127.0.0.1", _port_of(process, errors), "bench")
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _port_of(process: subprocess.Popen[str], errors: TextIO) -> int:
    """From the banner. Raises UserError with the server's last words when it ends instead."""
    assert process.stdout is not None
    port = None
    for line in process.stdout:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1 ", line)
        port = int(found[1]) if found else port
        if line.startswith("curl ") and port is not None:  # the banner's last line
            return port
    errors.seek(0)
    last_words = errors.read().strip().splitlines() or ["it said nothing"]
    raise UserError(f"The server did not start: {last_words[-1]}")


def _row(clients: int, measured: dict[str, _Measured]) -> dict[str, Any]:
    speed = {way: median(one.tokens_per_second) for way, one in measured.items()}

    def ratio(way: str, baseline: str) -> tuple[float, float]:
        pairs = zip(measured[way].tokens_per_second, measured[baseline].tokens_per_second, strict=True)
        return median_with_lower_bound([a / b for a, b in pairs])

    speedup, speedup_bound = ratio("speculative", "plain")
    over_direct, over_direct_bound = ratio("plain", "direct")
    row: dict[str, Any] = {
        "concurrency": clients,
        "plain_tokens_per_second": round(speed["plain"], 2),
        "speculative_tokens_per_second": round(speed["speculative"], 2),
        "direct_tokens_per_second": round(speed["direct"], 2),
        "speculative_over_plain": round(speedup, 3),
        "speculative_over_plain_lower_bound": round(speedup_bound, 3),
        "http_over_direct": round(over_direct, 3),
        "http_over_direct_lower_bound": round(over_direct_bound, 3),
    }
    for prefix, way in (("", "speculative"), ("plain_", "plain")):
        first = [answer.first_seconds for answer in measured[way].answers]
        gaps = [gap for answer in measured[way].answers for gap in answer.gaps]
        for name, seconds in (("ttft", first), ("itl", gaps)):
            for percentile in (50, 99):
                milliseconds = round(1000 * float(np.percentile(seconds, percentile)), 1) if seconds else None
                row[f"{prefix}{name}_ms_p{percentile}"] = milliseconds
    return row


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = {
        "concurrency": "clients",
        "plain_tokens_per_second": "plain tok/s",
        "speculative_tokens_per_second": "speculative tok/s",
        "speculative_over_plain": "ratio",
        "http_over_direct": "HTTP / engine",
        "ttft_ms_p50": "TTFT p50 ms",
        "ttft_ms_p99": "p99",
        "itl_ms_p50": "piece gap p50 ms",
        "itl_ms_p99": "p99",
    }
    table = Table(*columns.values(), title=f"livedraft bench serve, draft {result['draft_version']}")
    for row in result["rows"]:
        table.add_row(*(str(row[name]) for name in columns))
    Console().print(table)
