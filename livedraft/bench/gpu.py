"""`livedraft bench gpu`: all that is promised of a GPU, in one command of a few minutes; the table comes last.

Without a GPU everything runs to its end in small sizes, on the same padded steps, replayed eagerly; bars are not judged then.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from livedraft.bench.alternate import alternate, joined, median_with_lower_bound
from livedraft.bench.contender import Contender
from livedraft.bench.demo_stream import plant_shop_prompts
from livedraft.config import EngineConfig, SpeculationConfig
from livedraft.device import choose_execution_path
from livedraft.drafts.database import read_status
from livedraft.llm import LLM
from livedraft.models.config import ModelConfig
from livedraft.models.decoder import weight_tensors
from livedraft.models.load import LoadedModel, build_weights, expected_shapes
from livedraft.models.native import make_decoder
from livedraft.models.static_decoder import StaticDecoder
from livedraft.records import SamplingParams, UserError

_NO_BARS = "not judged: no GPU, and sizes are reduced"
_UNSEEN = 7
"""Seed of the demo's stream: what is measured on was not served by `livedraft demo`."""
_seeds = itertools.count(100)
"""Of the load: no prompt comes twice, so nothing is found in a prefix cache."""
_DRAFTED = 3
_LOAD_TOKENS = 128
_SWAPS = 6
_TRAINER_PATIENCE_SECONDS = 60.0
_LARGE_BYTES = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_prompts: int
    batch: int
    max_tokens: int
    num_rounds: int
    num_windows: int


ON_GPU = Sizes(num_prompts=12, batch=32, max_tokens=128, num_rounds=1, num_windows=6)
ON_CPU = Sizes(num_prompts=2, batch=4, max_tokens=16, num_rounds=1, num_windows=2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One promise. `value` is None where it was not run, `meets` where there is nothing to judge; `note` says why."""

    name: str
    value: float | None
    bar: str
    meets: bool | None
    note: str = ""


def run(*, draft: str, model: str, threads: int | None, as_json: bool) -> None:
    started = time.perf_counter()
    has_gpu = torch.cuda.is_available()
    sizes = ON_GPU if has_gpu else ON_CPU
    if not has_gpu:
        print(
            "There is no GPU here: the same steps run eagerly in reduced sizes, and no bar is judged.", file=sys.stderr
        )
    rows: list[Row] = []

    def add(name: str, value: float | None, bar: str, is_met: bool | None, note: str = "") -> None:
        if value is not None and not has_gpu:
            is_met, note = None, f"{note}; {_NO_BARS}" if note else _NO_BARS
        rows.append(Row(name=name, value=value, bar=bar, meets=is_met, note=note))
        print(f"{time.perf_counter() - started:5.0f} s  {name}: {value}", file=sys.stderr, flush=True)

    def opened(**options: Any) -> LLM:
        config = EngineConfig(max_num_seqs=sizes.batch, max_model_len=512, num_prefix_slots=0)
        fixed = SpeculationConfig(num_speculative_tokens=_DRAFTED, suffix_decoding=False)
        return LLM(model, **{"draft": draft, "num_threads": threads, "engine": config, "speculation": fixed, **options})

    with opened(graphs=True, speculation=SpeculationConfig(suffix_decoding=False)) as graphs:
        execution, attention = graphs.path.description, _static(graphs).attention[0]
        prompts = _tokenised(graphs, sizes.num_prompts)
        with opened(graphs=False, draft="none") as eager:
            _graphs_against_eager(add, graphs, eager, prompts, sizes)
        _speculation(add, graphs, draft, prompts, sizes)
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "state"
            with opened(graphs=True) as still, opened(graphs=True, state=state, learn=True) as learning:
                _learning_against_not(add, still, learning, state, sizes)
                _swaps_under_load(add, learning, draft, sizes)
    _same_output(add, opened, sizes)
    _large_model(add, has_gpu)
    result = {
        "device": torch.cuda.get_device_name() if has_gpu else "cpu", "torch": torch.__version__, "execution": execution,
        "attention": attention, "draft": draft, "reduced": not has_gpu, "seconds": round(time.perf_counter() - started, 1),
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(result, rows)


Add = Callable[..., None]


def _static(llm: LLM) -> StaticDecoder:
    assert isinstance(llm.target, StaticDecoder), "the padded steps need a target the native decoder reads"
    return llm.target


def _tokenised(llm: LLM, count: int) -> list[list[int]]:
    texts = plant_shop_prompts(count, _UNSEEN)
    if not llm.tokenizer.has_chat_template:
        return [llm.tokenizer.encode(text) for text in texts]
    return [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def _graphs_against_eager(add: Add, graphs: LLM, eager: LLM, prompts: list[list[int]], sizes: Sizes) -> None:
    sampling = SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True)
    contenders = {"graphs": Contender(graphs, None, sampling), "eager": Contender(eager, None, sampling)}
    for contender in contenders.values():
        contender(prompts[0])
    timings = alternate(contenders, prompts, num_rounds=sizes.num_rounds)
    ratio, low = median_with_lower_bound(timings["graphs"].pair_ratios(timings["eager"]))
    speeds = ", ".join(f"{name} {timing.tokens_per_second():.0f} tokens/s" for name, timing in timings.items())
    failure = _static(graphs).ladder.failure
    note = f"lower bound {low:.2f}; {speeds}" + (f"; some graphs failed: {failure}" if failure else "")
    add("graphs / eager, plain decoding, batch 1", round(ratio, 2), ">= 4", ratio >= 4, note)


def _speculation(add: Add, llm: LLM, draft: str, prompts: list[list[int]], sizes: Sizes) -> None:
    """The cost model chooses k, as in service."""
    has_learned = draft != "untrained"
    why = "" if has_learned else "an untrained draft: give a learned one with --draft"
    sampling = SamplingParams(max_tokens=sizes.max_tokens)
    for batch, bar in ((1, 1.8), (sizes.batch, 1.0)):
        contenders = {"speculative": Contender(llm, draft, sampling), "plain": Contender(llm, None, sampling)}
        groups = [[prompt] for prompt in prompts] if batch == 1 else [_tokenised(llm, batch)] * sizes.num_prompts
        together = {name: joined(contender.together) for name, contender in contenders.items()}
        for answer in together.values():
            answer(groups[0])
        timings = alternate(together, groups, num_rounds=sizes.num_rounds)
        ratio, low = median_with_lower_bound(timings["speculative"].pair_ratios(timings["plain"]))
        acceptance = contenders["speculative"].stats.acceptance_rate
        note = f"lower bound {low:.2f}; acceptance {'-' if acceptance is None else f'{acceptance:.2f}'}"
        name = f"speculative / plain, batch {batch}"
        add(
            name, round(ratio, 2), f">= {bar}", ratio >= bar if has_learned else None, f"{note}; {why}" if why else note
        )


def _learning_against_not(add: Add, still: LLM, learning: LLM, state: Path, sizes: Sizes) -> None:
    """Rounds of equal work, k fixed, in turn; the trainer has to be at work by then."""
    deadline = time.monotonic() + _TRAINER_PATIENCE_SECONDS
    while time.monotonic() < deadline and not read_status(state, "trainer").get("num_train_tokens"):
        _round_seconds(learning, sizes.batch)
    before = read_status(state, "trainer").get("num_train_tokens", 0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for window in range(2 * sizes.num_windows):
        is_learning = bool(window % 2)
        seconds[is_learning] += _round_seconds(learning if is_learning else still, sizes.batch)
    trained = read_status(state, "trainer").get("num_train_tokens", 0) - before
    ratio = median(seconds[True]) / median(seconds[False])
    note = f"p50 of a round {1000 * median(seconds[False]):.2f} ms without; {trained} tokens trained meanwhile"
    add(f"round with learning / without, p50, batch {sizes.batch}", round(ratio, 3), "<= 1.05", ratio <= 1.05, note)


def _round_seconds(llm: LLM, batch: int) -> list[float]:
    return [seconds for _, seconds in _timed_rounds(llm, batch)]


def _timed_rounds(llm: LLM, batch: int) -> list[tuple[float, float]]:
    """(when it ended, how long it took) of each round in which all decode and none ends."""
    sampling = SamplingParams(max_tokens=_LOAD_TOKENS, ignore_eos=True)
    prompts = plant_shop_prompts(batch, next(_seeds))
    states = llm.add([llm.request(prompt, sampling) for prompt in prompts])
    rounds: list[tuple[float, float]] = []
    last = [time.perf_counter()]

    def after_round() -> None:
        now = time.perf_counter()
        if all(state.num_output_tokens > 1 and state.finish_reason is None for state in states):
            rounds.append((now, now - last[0]))
        last[0] = now

    llm.run(after_round)
    if not rounds:
        raise UserError("No round had all requests decoding; the prompts do not fit this model's context.")
    return rounds


def _swaps_under_load(add: Add, llm: LLM, draft: str, sizes: Sizes) -> None:
    """Versions are filled by another thread and taken up while a full batch decodes; the longest round against the median of
    the rounds before any swap."""
    weights = llm.draft_weights(draft)
    quiet = median(_round_seconds(llm, sizes.batch))
    is_over = threading.Event()
    taken_up = []

    def swap() -> None:
        for number in range(_SWAPS):
            if is_over.wait(0.1):
                return
            llm.engine.offer_draft(llm.laid_out(weights, f"swap-{number}"), prior=0.5)
            taken_up.append(time.perf_counter())

    thread = threading.Thread(target=swap, name="swapping")
    thread.start()
    rounds = []
    while thread.is_alive():
        rounds += _timed_rounds(llm, sizes.batch)
    is_over.set()
    thread.join()
    first = min(taken_up, default=float("inf"))
    during = [seconds for ended, seconds in rounds if ended >= first - 0.1]
    if not during:
        add("longest stall by a swap, ms", None, "<= 20", None, "no round ran during a swap")
        return
    stall = 1000 * (max(during) - quiet)
    add(
        "longest stall by a swap, ms",
        round(stall, 1),
        "<= 20",
        stall <= 20,
        f"{len(taken_up)} swaps, batch {sizes.batch}",
    )


def _same_output(add: Add, opened: Callable[..., LLM], sizes: Sizes) -> None:
    """float32, greedy, speculative: with graphs and without, alone and together."""
    sampling = SamplingParams(max_tokens=sizes.max_tokens)
    outputs = {}
    for graphs in (False, True):
        with opened(graphs=graphs, dtype="float32") as llm:
            prompts = _tokenised(llm, sizes.batch)
            alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in prompts[: sizes.num_prompts]]
            outputs[graphs] = [*alone, *(one.token_ids for one in llm.generate(prompts, sampling))]
    same = sum(ours == theirs for ours, theirs in zip(outputs[True], outputs[False], strict=True))
    share = same / len(outputs[True])
    add(
        "greedy float32 answers equal without graphs",
        round(share, 3),
        "= 1",
        share == 1.0,
        f"{same} of {len(outputs[True])}",
    )


# --- a large model --------------------------------------------------------------------------------------------------

_SEVEN_B = ModelConfig(
    family="llama", vocabulary_size=32000, width=4096, feed_forward_width=11008, num_layers=32, num_heads=32, num_kv_heads=32,
    head_width=128, norm_eps=1e-5, rope_theta=10000.0, max_positions=4096, has_tied_embeddings=False,
)  # fmt: skip


def _large_model(add: Add, has_gpu: bool) -> None:
    name, bar = "share of the memory limit, 7B shape, bf16, batch 1", ">= 0.75"
    if not has_gpu:
        add(name, None, bar, None, "skipped: no GPU")
        return
    free = torch.cuda.mem_get_info()[0]
    if free < 8 * _LARGE_BYTES:
        add(name, None, bar, None, f"skipped: {free / 2**30:.0f} GiB of GPU memory are free, 32 are needed")
        return
    rate = _bytes_per_second()
    path = choose_execution_path("bfloat16")
    weights = build_weights(random_model(_SEVEN_B, path.dtype, path.device), path)
    decoder = make_decoder(_SEVEN_B, weights, path, num_slots=1, max_length=256)
    assert isinstance(decoder, StaticDecoder)
    found = decoder.ladder.covering((1, 1, 128))
    assert found is not None
    seconds = _replayed_seconds(found[1])
    num_bytes = sum(tensor.nbytes for tensor in weight_tensors(weights)) - weights.embedding_VD.nbytes
    share = num_bytes / rate / seconds
    note = f"{1000 * seconds:.2f} ms a pass, {rate / 1e12:.2f} TB/s, {decoder.attention[0]}"
    add(name, round(share, 3), bar, share >= 0.75, note)


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Of this shape, made on the device."""
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)
        for name, shape in expected_shapes(config).items()
    }
    return LoadedModel(config=config, tensors=tensors, fingerprint="random")


def _bytes_per_second() -> float:
    """Of memory: copying reads and writes every byte."""
    source = torch.zeros(_LARGE_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    copy = torch.empty_like(source)
    return 2 * _LARGE_BYTES / _replayed_seconds(lambda: copy.copy_(source))


def _replayed_seconds(work: Callable[[], object], num_repeats: int = 30) -> float:
    """A median; on a GPU, by its own clock."""
    work()
    seconds = []
    for _ in range(num_repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return median(seconds)


def _print_table(result: dict[str, Any], rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"livedraft bench gpu: {result['device']}, {result['execution']}, {result['seconds']:.0f} s"
    table = Table("measured", "value", "bar", "met", "note", title=title)
    for row in rows:
        met = {True: "yes", False: "NO", None: "-"}[row.meets]
        table.add_row(row.name, "-" if row.value is None else f"{row.value:g}", row.bar, met, row.note)
    Console().print(table)
