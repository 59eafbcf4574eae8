"""`livedraft bench serve --compare-learning`: what the trainer costs those who wait for tokens.

One server, one steady stream of requests at a share of its capacity (open loop, Poisson arrivals), windows with learning and
without, neither traces nor training, in turn. Every request decodes plainly: a draft that gets better in between would hide
the cost, and a trace teaches the same either way.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from livedraft.bench.http_client import Streamed, StreamingClient
from livedraft.bench.progress import Bar
from livedraft.bench.serve import bench_prompts, running_server
from livedraft.drafts.database import read_status, set_control
from livedraft.drafts.registry import Registry
from livedraft.records import DEFAULT_ROUTE, UserError
from livedraft.tokenizer import Message

_CAPACITY_CLIENTS, _CAPACITY_REQUESTS = 4, 24
_REPORT_SECONDS = 5.5
"""After this long the trainer has said what it did, also in the middle of its work."""
_IDLE_SECONDS = 20.0
_LONGEST_START_SECONDS = 120.0


@dataclass(kw_only=True)
class _Side:
    gaps: list[float] = field(default_factory=list)
    medians_ms: list[float | None] = field(default_factory=list)
    """Of the gaps of each window."""
    num_tokens: int = 0
    num_train_tokens: int = 0
    train_flops: float = 0.0
    serve_flops: float = 0.0
    trainer_cpu_seconds: float = 0.0
    seconds: float = 0.0


def run(
    *, level: str, load: float, windows: int, window_seconds: float, max_tokens: int, prompts_path: Path | None, model: str,
    dtype: str, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    prompts = bench_prompts(prompts_path, 400)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        options = ["--learn", level, "--state", str(state)]
        with running_server(model, options, dtype=dtype, threads=threads) as address:
            result = asyncio.run(_measure(address, state, prompts, load, windows, window_seconds, max_tokens))
        promoted = [row for row in Registry(state).versions(DEFAULT_ROUTE) if (row["decision"] or {}).get("promote")]
    result |= {"level": level, "load": load, "windows": windows, "versions_promoted": len(promoted)}
    print(json.dumps(result) if as_json else "\n".join(f"{name:>32}  {value}" for name, value in result.items()))


async def _measure(
    address: tuple[str, int, str], state: Path, prompts: list[list[Message]], load: float, windows: int,
    window_seconds: float, max_tokens: int,
) -> dict[str, Any]:  # fmt: skip
    name = address[2]
    bodies = (
        {
            "model": name, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "num_speculative_tokens": 0,
        }
        for messages in itertools.cycle(prompts)
    )  # fmt: skip
    pid = await _trainer_pid(state)
    set_control(state, "paused", 1)
    capacity = await _capacity(address, bodies)
    sides = {"off": _Side(), "on": _Side()}
    bar = Bar()
    for number in range(2 * windows):
        pair = number // 2
        side = ("off", "on")[(number + pair) % 2]  # off on, on off, ...: neither is always the later one
        chance = random.Random(pair)  # both sides of a pair meet the same arrivals
        await asyncio.sleep(_REPORT_SECONDS)  # paused: what is idle before and after the requests is no part of this
        before = _work(state)
        set_control(state, "paused", int(side == "off"))
        bar(f"windows, learning {side:<4}", number, 2 * windows)
        # Off is nothing kept either, as under --no-learn; and what is not kept is no backlog for the windows with learning.
        asked = ({**body, "store": side == "on"} for body in bodies)
        started, cpu = time.monotonic(), _cpu_seconds(pid)
        answers = await _steady(address, asked, load * capacity, window_seconds, chance)
        sides[side].seconds += time.monotonic() - started
        sides[side].trainer_cpu_seconds += _cpu_seconds(pid) - cpu
        gaps = [gap for answer in answers for gap in answer.gaps]
        sides[side].gaps += gaps
        sides[side].medians_ms.append(round(1000 * float(np.median(gaps)), 1) if gaps else None)
        sides[side].num_tokens += sum(answer.num_tokens for answer in answers)
        set_control(state, "paused", 1)
        await asyncio.sleep(_REPORT_SECONDS)
        after = _work(state)
        for figure in ("num_train_tokens", "train_flops", "serve_flops"):
            setattr(sides[side], figure, getattr(sides[side], figure) + after[figure] - before[figure])
    bar.stop()
    set_control(state, "paused", 0)
    return _result(sides, capacity) | await _idle(state, pid)


async def _trainer_pid(state: Path) -> int:
    """It loads the target first."""
    deadline = time.monotonic() + _LONGEST_START_SECONDS
    while time.monotonic() < deadline:
        pid = read_status(state, "trainer").get("pid")
        if pid is not None:
            return int(pid)
        await asyncio.sleep(0.2)
    raise UserError(
        f"The trainer did not come up within {_LONGEST_START_SECONDS:.0f} s; see trainer.log in the state folder."
    )


def _work(state: Path) -> dict[str, float]:
    """What trainer and serving have done so far, as they say themselves every few seconds."""
    trainer, serving = read_status(state, "trainer"), read_status(state, "serving")
    return {name: (trainer | serving).get(name, 0) for name in ("num_train_tokens", "train_flops", "serve_flops")}


async def _idle(state: Path, pid: int) -> dict[str, Any]:
    """Nobody asks any more: how much of a core does the trainer take while it has something to learn?"""
    busy_seconds = measured_seconds = 0.0
    deadline = time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < deadline:
        is_training = _is_training(state)
        started, cpu = time.monotonic(), _cpu_seconds(pid)
        await asyncio.sleep(0.5)
        if is_training and _is_training(state):
            measured_seconds += time.monotonic() - started
            busy_seconds += _cpu_seconds(pid) - cpu
    share = round(busy_seconds / measured_seconds, 2) if measured_seconds >= 2.0 else None
    return {"idle_core_share": share, "idle_seconds_measured": round(measured_seconds, 1)}


def _is_training(state: Path) -> bool:
    return read_status(state, "trainer")["status"] not in ("waiting for traces", "paused", "resting")


def _cpu_seconds(pid: int) -> float:
    """Of a process and its threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _capacity(address: tuple[str, int, str], bodies: Any) -> float:
    """Requests a second of a closed loop, learning paused."""
    left = iter(range(_CAPACITY_REQUESTS))

    async def client() -> None:
        connection = StreamingClient(*address[:2])
        for _ in left:
            await connection.chat(next(bodies))
        await connection.close()

    connection = StreamingClient(*address[:2])  # warm up
    await connection.chat(next(bodies))
    await connection.close()
    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(_CAPACITY_CLIENTS)))
    return _CAPACITY_REQUESTS / (time.perf_counter() - started)


async def _steady(
    address: tuple[str, int, str], bodies: Any, requests_per_second: float, seconds: float, chance: random.Random
) -> list[Streamed]:
    """Poisson arrivals for `seconds`; waits for the last answer."""
    free: list[StreamingClient] = []

    async def one() -> Streamed:
        connection = free.pop() if free else StreamingClient(*address[:2])
        answer = await connection.chat(next(bodies))
        free.append(connection)
        return answer

    tasks = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        tasks.append(asyncio.ensure_future(one()))
        await asyncio.sleep(chance.expovariate(requests_per_second))
    answers = list(await asyncio.gather(*tasks))
    for connection in free:
        await connection.close()
    return answers


def _result(sides: dict[str, _Side], capacity: float) -> dict[str, Any]:
    off, on = sides["off"], sides["on"]
    if not off.gaps or not on.gaps:
        raise UserError("No token was served in a window; give longer windows.")
    figures: dict[str, Any] = {"capacity_requests_per_second": round(capacity, 2)}
    for percentile in (50, 99):
        values = {name: 1000 * float(np.percentile(side.gaps, percentile)) for name, side in sides.items()}
        figures[f"itl_p{percentile}_ratio"] = round(values["on"] / values["off"], 3)
        figures |= {f"itl_ms_p{percentile}_{name}": round(value, 1) for name, value in values.items()}
    return figures | {
        **{f"itl_ms_p50_{name}_by_window": side.medians_ms for name, side in sides.items()},
        "train_tokens_per_served_token": round(on.num_train_tokens / on.num_tokens, 2),
        "train_flops_per_serve_flops": round(on.train_flops / on.serve_flops, 3) if on.serve_flops else None,
        "trainer_core_share_on": round(on.trainer_cpu_seconds / on.seconds, 3),
        "tokens_on": on.num_tokens,
        "tokens_off": off.num_tokens,
    }
