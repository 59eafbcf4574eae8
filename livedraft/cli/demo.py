"""`livedraft demo`: a stream of requests, a draft that learns from it, and the proof on held-out prompts.

1. Serve the stream in bursts with pauses between them; the training process uses the pauses (it steps aside while
   requests run). One line a second.
2. Stop learning. Answer held-out prompts in turn with plain decoding, the untrained and the learned draft.
3. Print the table and whether the outputs are the same.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from livedraft.bench.alternate import Timing, alternate
from livedraft.bench.contender import Contender
from livedraft.bench.demo_stream import plant_shop_prompts, repeated_share
from livedraft.bench.progress import Bar
from livedraft.bench.same_output import Sameness, compare_outputs
from livedraft.cli.demo_page import DemoPage, serve_together
from livedraft.config import EngineConfig, LearningConfig, SpeculationConfig
from livedraft.device import num_available_cores
from livedraft.draft_source import UNTRAINED
from livedraft.drafts.database import DATABASE_NAME, read_status
from livedraft.events import Event, Events, described
from livedraft.learning.capture import write_secret
from livedraft.learning.store import TraceRow, TraceStore
from livedraft.llm import LLM
from livedraft.models.pull import MODELS, pull, resolve_model
from livedraft.records import DEFAULT_ROUTE, SamplingParams, UserError
from livedraft.speculation.stats import SpeculationStats

NUM_HELD_OUT_PROMPTS = 10
HELD_OUT_MAX_TOKENS = 64
"""Of the stream's 96: an answer cut too short is mostly its prompt, which no draft shortens."""
NUM_ALTERNATIONS = 2
NUM_FIRST_REQUESTS = 10
SHORT_STREAM, SHORT_STREAM_BURST, SHORT_STREAM_INTERVAL = 100, 8, 8.5
BURST, INTERVAL = 24, 17.5
"""Requests that arrive together, and seconds from one burst to the next at most: what is left after serving is spare compute.
A trainer that has done what it can before is not waited for."""
SHORTEST_PAUSE_SECONDS = 0.5
LONGEST_START_SECONDS, LONGEST_SETTLE_SECONDS = 15.0, 12.0


def run(
    *, num_requests: int, max_tokens: int, seed: int, state: Path | None, model: str, as_json: bool, opens_page: bool
) -> None:
    if model in MODELS:
        pull(model)
    with ExitStack() as stack:
        if state is None:
            state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="livedraft-demo-")))
        elif (state / DATABASE_NAME).exists():
            raise UserError(
                f"{state} already holds drafts; the demo starts from an untrained one, so give a fresh --state."
            )
        # The held-out split follows the seed too: the same requests train.
        write_secret(state, random.Random(seed).randbytes(32))
        log = _Log(as_json)
        events = Events()
        events.subscribe(log.event)
        llm = stack.enter_context(
            LLM(
                model,
                state=state,
                learn=True,
                engine=EngineConfig(
                    max_num_seqs=SHORT_STREAM_BURST if num_requests < SHORT_STREAM else BURST, max_model_len=512
                ),
                learning=LearningConfig(
                    level="on", seed=seed, num_threads=num_available_cores(), micro_batch_tokens=1024
                ),
                # What is watched is the draft: suffixes of a stream on one subject would be right from the start.
                speculation=SpeculationConfig(suffix_decoding=False),
                events=events,
            )
        )
        log.print(f"{llm.path.description}. {num_requests} requests to a plant shop, greedy, max_tokens {max_tokens}.")
        page = None
        if opens_page:
            page = stack.enter_context(DemoPage(llm, model))
            log.print(f"Dashboard: {page.url}")
            webbrowser.open(page.url)
        prompts = plant_shop_prompts(num_requests + NUM_HELD_OUT_PROMPTS, seed)
        sampling = SamplingParams(max_tokens=max_tokens)
        _wait_for(lambda: bool(read_status(state, "trainer")), LONGEST_START_SECONDS)
        answers = _serve_stream(llm, prompts[:num_requests], sampling, log)
        rows = _wait_until_settled(llm, num_requests, log)
        learned_version = llm.registry.in_service(DEFAULT_ROUTE).id  # type: ignore[union-attr]  # it learns
        if page is not None:
            page.freeze()  # looked at until the table is printed, and no work beside what is timed
            log.print("The dashboard shows the stream until the table is here; it takes no chat any more.")
        llm.close()  # learning ends here; only speed is measured from now on
        timings, stats, same = _compare(llm, prompts[num_requests:], learned_version, model, log)
        result = _result(llm, rows, timings, stats, same, learned_version)
        result["repeated_8_gram_share"] = round(repeated_share(timings["learned"].outputs, answers), 3)
        if as_json:
            print(json.dumps(result))
        else:
            _print_result(result)


# --- the stream -----------------------------------------------------------------------------------------------------


def _serve_stream(llm: LLM, prompts: list[str], sampling: SamplingParams, log: _Log) -> list[list[int]]:
    """Bursts at a fixed interval, served together; returns the answers' tokens."""
    size = llm.engine.config.max_num_seqs
    interval = SHORT_STREAM_INTERVAL if size == SHORT_STREAM_BURST else INTERVAL
    started = time.monotonic()
    answers: list[list[int]] = []
    for number, first in enumerate(range(0, len(prompts), size), start=1):
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + size]]
        requests = [llm.request(message, sampling) for message in messages]
        answers += serve_together(llm, requests, partial(log.tick, llm, len(answers)))
        next_burst = started + number * interval
        pause_end = max(next_burst, time.monotonic() + SHORTEST_PAUSE_SECONDS)
        # No request: the compute a real service leaves idle between its peaks.
        while time.monotonic() < pause_end and not _has_settled(llm, len(answers)):
            log.tick(llm, len(answers))
            time.sleep(0.1)
    return answers


def _wait_until_settled(llm: LLM, num_requests: int, log: _Log) -> list[TraceRow]:
    """The stream is over: the trainer scores the last requests and finishes what it has; returns the scored rows."""

    def is_settled() -> bool:
        log.tick(llm, num_requests)
        return _has_settled(llm, num_requests)

    _wait_for(is_settled, LONGEST_SETTLE_SECONDS)
    assert llm.state is not None
    return [row for row in TraceStore(llm.state).rows() if row.alpha is not None]


def _has_settled(llm: LLM, num_requests: int) -> bool:
    """Has the trainer scored so many requests, and nothing left that it could do with them?"""
    assert llm.state is not None
    if read_status(llm.state, "trainer").get("status") != "waiting for traces":
        return False
    rows = TraceStore(llm.state).rows()
    return len(rows) == num_requests and all(row.alpha is not None for row in rows)


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


class _Log:
    """One line a second, and one for each event; on standard error, so that --json leaves standard output alone."""

    def __init__(self, as_json: bool) -> None:
        self._file = sys.stderr if as_json else sys.stdout
        self._started = time.monotonic()
        self._last = 0.0
        self._last_tokens = 0
        self._last_drafted = (0, 0)
        self._first_rate: float | None = None

    def print(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def event(self, event: Event) -> None:
        self.print(f"    {described(event)}")

    def tick(self, llm: LLM, num_done: int) -> None:
        now = time.monotonic()
        if now - self._last < 1.0:
            return
        stats = llm.engine.stats
        seconds = now - (self._last or self._started)
        speed = (stats.num_emitted_tokens - self._last_tokens) / seconds
        drafted = stats.num_draft_tokens - self._last_drafted[0]
        accepted = stats.num_accepted_tokens - self._last_drafted[1]
        rate = accepted / drafted if drafted else None
        if self._first_rate is None and stats.num_draft_tokens >= 20:
            self._first_rate = stats.acceptance_rate
        self._last, self._last_tokens = now, stats.num_emitted_tokens
        self._last_drafted = (stats.num_draft_tokens, stats.num_accepted_tokens)
        assert llm.state is not None
        alphas = [row.alpha for row in TraceStore(llm.state).rows() if row.alpha is not None]
        alpha = f"{mean(alphas[:NUM_FIRST_REQUESTS]):.2f} -> {mean(alphas[-20:]):.2f}" if alphas else "-"
        length = stats.mean_acceptance_length
        self.print(
            f"{now - self._started:5.0f} s  requests {num_done:3d}  acceptance rate {_figure(rate)} "
            f"(start {_figure(self._first_rate)})  alpha {alpha}  {speed:4.0f} tok/s  "
            f"mean acceptance length {_figure(length)}  draft {llm.engine.draft_version}  "
            f"trainer: {read_status(llm.state, 'trainer').get('status', 'starting')}"
        )


def _figure(value: float | None) -> str:
    return "   -" if value is None else f"{value:.2f}"


# --- the proof ------------------------------------------------------------------------------------------------------


def _compare(
    llm: LLM, prompts: list[str], learned_version: str, model: str, log: _Log
) -> tuple[dict[str, Timing], dict[str, SpeculationStats], Sameness]:
    """Plain, untrained and learned draft, and the learned one beside suffixes of each answer's own text, on the same held-out
    prompts, batch 1, greedy, in turn."""
    log.print(f"Learning stopped. {len(prompts)} held-out prompts, {NUM_ALTERNATIONS} alternations, batch 1:")
    sampling = SamplingParams(max_tokens=HELD_OUT_MAX_TOKENS)
    token_ids = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    contenders = {
        name: Contender(llm, version, sampling)
        for name, version in (("plain", None), ("untrained", UNTRAINED), ("learned", learned_version))
    }
    contenders["with_suffixes"] = Contender(llm, learned_version, sampling, uses_suffixes=True)
    for contender in contenders.values():
        contender(token_ids[0])
        contender.forget_counts()
    stats = {name: contender.stats for name, contender in contenders.items()}
    bar, num_all = Bar(), NUM_ALTERNATIONS * len(token_ids)

    def report(name: str, num_done: int, num_of_call: int) -> None:
        # The first call has one round, the second the others.
        bar(name, num_done if num_of_call == len(token_ids) else len(token_ids) + num_done, num_all)

    # The untrained draft takes part in the first round only: it is there to be seen, not to be timed to the per cent.
    timings = alternate(contenders, token_ids, num_rounds=1, report=report)
    del contenders["untrained"]
    later = alternate(contenders, token_ids, num_rounds=NUM_ALTERNATIONS - 1, report=report)
    bar.stop()
    for name, timing in later.items():
        timings[name].extend(timing)
    plain = timings["plain"].outputs
    same = Sameness()
    for name in ("untrained", "learned", "with_suffixes"):
        same = same + compare_outputs(token_ids, plain, timings[name].outputs, resolve_model(model))
    return timings, stats, same


def _result(
    llm: LLM,
    rows: list[TraceRow],
    timings: dict[str, Timing],
    stats: dict[str, SpeculationStats],
    same: Sameness,
    learned_version: str,
) -> dict[str, Any]:
    assert llm.registry is not None
    versions = llm.registry.versions(DEFAULT_ROUTE)
    first_version = versions[0]["id"]
    first = [row for row in rows[:NUM_FIRST_REQUESTS] if row.draft_version == first_version]
    last = rows[-max(1, len(rows) // 5) :]
    return {
        "alpha_start": round(_mean_alpha(first), 4),
        "alpha_end": round(_mean_alpha(last), 4),
        "requests": len(rows),
        "versions_promoted": sum(row["decision"] is not None and bool(row["decision"]["promote"]) for row in versions),
        "learned_version": learned_version,
        **{f"{name}_tokens_per_second": round(timing.tokens_per_second(), 2) for name, timing in timings.items()},
        "speedup": round(speedup(timings["plain"], timings["learned"]), 3),
        "speedup_with_suffixes": round(speedup(timings["plain"], timings["with_suffixes"]), 3),
        "same_output": same.num_same,
        "near_ties": len(same.near_tie_gaps),
        "near_tie_gaps": same.near_tie_gaps,
        "compared": same.num_compared,
        "drafts": {
            name: {
                "acceptance_rate": stats[name].acceptance_rate,
                "mean_acceptance_length": stats[name].mean_acceptance_length,
            }
            for name in timings
        },
    }


def _mean_alpha(rows: list[TraceRow]) -> float:
    return mean(row.alpha for row in rows if row.alpha is not None)


def speedup(plain: Timing, other: Timing) -> float:
    """Median over alternations of the ratio of tokens a second."""
    return median(b / a for a, b in zip(plain.speeds(), other.speeds(), strict=True))


_LABELS = {
    "plain": "plain", "untrained": "untrained draft", "learned": "learned draft", "with_suffixes": "learned draft, suffixes",
}  # fmt: skip


def _print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "", "tokens/s", "acceptance rate", "mean acceptance length", title="Held-out prompts, batch 1, greedy"
    )
    for name, label in _LABELS.items():
        draft = result["drafts"][name]
        table.add_row(
            label,
            f"{result[f'{name}_tokens_per_second']:.1f}",
            _figure(draft["acceptance_rate"]).strip(),
            _figure(draft["mean_acceptance_length"]).strip(),
        )
    console = Console()
    console.print(table)
    gaps = (
        f" ({result['near_ties']} parted at a near tie, gaps {result['near_tie_gaps']})" if result["near_ties"] else ""
    )
    console.print(
        f"Learned draft: {result['speedup']:.2f} x plain, {result['speedup_with_suffixes']:.2f} x with suffixes. "
        f"Alpha {result['alpha_start']:.2f} -> {result['alpha_end']:.2f} "
        f"over {result['requests']} requests, {result['versions_promoted']} versions promoted.\n"
        f"Same output: {result['same_output']} of {result['compared']}{gaps}. "
        f"{result['repeated_8_gram_share']:.0%} of the held-out answers' 8-grams occur in training answers.",
        highlight=False,
    )
