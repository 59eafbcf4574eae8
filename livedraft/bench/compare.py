"""`livedraft bench compare`: the same target weights, draft and prompts through livedraft and through the engines one would
take instead.

For each batch size and temperature one interleaved run: every engine answers a group of prompts before the next group comes,
in rotating order, after one group that is not counted. All run the target's weights as livedraft has them, and the same draft,
written for each in its own format. A quantised GGUF file is another model: its own row, with how much of the output is the
same. What is not installed, not named or cannot be run is null, and `not_run` says why.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from livedraft.bench.alternate import Timing, alternate, joined, median_with_interval
from livedraft.bench.contender import Contender
from livedraft.bench.machine import hardware
from livedraft.bench.outputs import check_outputs
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_prompts
from livedraft.bench.rivals import (
    Answer,
    Group,
    LlamaServer,
    Transformers,
    Vllm,
    llama_draft_flags,
    llama_server,
    llama_version,
    vllm_engine,
)  # fmt: skip
from livedraft.device import versions
from livedraft.draft_source import UNTRAINED, is_whole_model
from livedraft.export import export_draft, write_hf
from livedraft.llm import LLM
from livedraft.models.export_gguf import export_gguf
from livedraft.models.load import load_model
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams, UserError

ENGINES = (
    "livedraft_plain", "livedraft_speculative", "livedraft_with_suffixes", "transformers_generate", "transformers_assisted",
    "llama_cpp_plain", "llama_cpp_speculative", "llama_cpp_own_file", "vllm_plain", "vllm_speculative",
)  # fmt: skip
_NUM_VLLM_DRAFTED = 3
"""vLLM wants one length for all rounds."""
_REST_SECONDS = 0.25
_NO_DRAFT = "there is no learned draft to give it; name one with --draft or --state"


def run(
    prompts_path: Path, *, limit: int, max_tokens: int, batches: Sequence[int], temperatures: Sequence[float], rounds: int,
    draft: str, state: Path | None, model: str, dtype: str, quantization: str, threads: int | None,
    llama_server: Path | None, vllm_python: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    check_outputs(plot=plot)
    prompts = read_prompts(prompts_path, limit * max(batches))
    with ExitStack() as stack:
        llm = stack.enter_context(
            LLM(model, draft=draft, state=state, dtype=dtype, quantization=quantization, num_threads=threads)
        )
        token_ids = [llm.tokenizer.encode_chat(messages) for messages in prompts]
        arena = _Arena(stack, llm, model, draft, llama_server, vllm_python)
        settings = []
        for batch in batches:
            groups = [[token_ids[(i * batch + j) % len(token_ids)] for j in range(batch)] for i in range(limit)]
            if batch == 1:
                groups = groups[: len(token_ids)]
            with ExitStack() as servers:
                arena.start_servers(servers, batch)
                for temperature in temperatures:
                    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
                    settings.append(_setting(arena, groups, sampling, batch, rounds))
        result = {
            **settings[0],
            "settings": settings,
            "execution": llm.path.description,
            "draft_version": arena.version,
            "max_tokens": max_tokens,
            "rounds": rounds,
            "warm_up": "one group of prompts for each engine and setting, not counted",
            "versions": arena.versions,
            "commands": arena.commands,
            "hardware": hardware(),
        }
    if plot is not None:
        from livedraft.bench.plots import plot_speeds

        plot_speeds(settings, ENGINES, plot)
    print(json.dumps(result)) if as_json else _print(result)


class _Arena:
    """All engines, with the target and the draft in the form each wants. Files and processes end with `stack`."""

    def __init__(
        self, stack: ExitStack, llm: LLM, model: str, draft: str, llama: Path | None, vllm_python: Path | None
    ) -> None:
        self.llm, self._model, self._llama = llm, model, llama
        resident = llm.engine.draft_version if llm.engine.draft else None
        self.version = draft if is_whole_model(draft) else resident
        self.versions: dict[str, str] = versions()
        self.commands: dict[str, str] = {}
        self._not_run: dict[str, str] = {}
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="livedraft-compare-")))
        self._source = resolve_model(model)
        if llama is not None:
            self.versions["llama_cpp"] = llama_version(llama)
            if self._source.suffix != ".gguf":
                raise UserError("bench compare runs llama.cpp on GGUF models only.")
            self._target_gguf = self._folder / "target-bf16.gguf"
            export_gguf(model, self._target_gguf, type="bf16")
        self._draft_folder = self._draft_as("hf", needed=True)
        self._draft_gguf = self._draft_as("gguf", needed=llama is not None)
        self._transformers = Transformers(llm, model)
        self._servers: dict[str, LlamaServer] = {}
        self._vllm = {} if vllm_python is None else self._start_vllm(stack, vllm_python)

    def _draft_as(self, format: str, *, needed: bool) -> Path | None:
        """The draft in service as another engine reads it; None where there is none, or it has no such form."""
        version = self.version
        if version in (None, UNTRAINED) or not needed:
            return None
        if is_whole_model(version):
            return Path(version) if Path(version).is_dir() == (format == "hf") else None
        file = self._folder / ("draft" if format == "hf" else "draft.gguf")
        export_draft(self.llm.registry, version, self._source, file, format=format)
        return file

    def _start_vllm(self, stack: ExitStack, python: Path) -> dict[str, Vllm]:
        """One engine without and, with a draft, one with it: vLLM cannot switch."""
        target = self._source
        if target.suffix == ".gguf":
            target = self._folder / "target"
            loaded = load_model(self._source, torch.bfloat16)
            write_hf(loaded.config, loaded.tensors, self.llm.tokenizer, target)
        shared = {
            "model": str(target), "tokenizer": str(target), "dtype": str(self._transformers.dtype).removeprefix("torch."),
            "max_model_len": self.llm.engine.config.max_model_len, "max_num_seqs": self.llm.engine.config.max_num_seqs,
            "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 29,
        }  # fmt: skip
        wanted: dict[str, dict[str, Any]] = {"vllm_plain": shared}
        if self._draft_folder is not None:
            wanted["vllm_speculative"] = shared | {
                "speculative_config": {
                    "method": "draft_model", "model": str(self._draft_folder), "num_speculative_tokens": _NUM_VLLM_DRAFTED,
                    "draft_sample_method": "probabilistic",
                }
            }  # fmt: skip
        engines = {}
        for name, keywords in wanted.items():
            log = self._folder / f"{name}.log"
            engines[name] = stack.enter_context(vllm_engine(python, log, self.llm.tokenizer.eos_token_ids, **keywords))
            self.commands[name] = f"LLM({', '.join(f'{key}={value!r}' for key, value in keywords.items())})"
            self.versions["vllm"] = f"{engines[name].version}, {engines[name].device}"
        return engines

    def start_servers(self, stack: ExitStack, batch: int) -> None:
        """llama.cpp's, which share their slots out at start."""
        self._servers = {}
        if self._llama is None:
            return
        wanted: dict[str, tuple[Path, tuple[str, ...]]] = {
            "llama_cpp_plain": (self._target_gguf, ()), "llama_cpp_own_file": (self._source, ())
        }  # fmt: skip
        if self._draft_gguf is not None:
            wanted["llama_cpp_speculative"] = (self._target_gguf, llama_draft_flags(self._llama, self._draft_gguf))
        for name, (file, more) in wanted.items():
            server = llama_server(self._llama, file, *more, threads=torch.get_num_threads(), batch=batch)
            self._servers[name] = stack.enter_context(server)
            self.commands[name] = " ".join(self._servers[name].command)

    def contenders(self, sampling: SamplingParams, batch: int) -> tuple[dict[str, Answer], dict[str, str]]:
        """Those that can answer at this batch size and temperature, and why the others cannot."""
        reasons: dict[str, str] = {}
        found: dict[str, Answer] = {"livedraft_plain": Contender(self.llm, None, sampling).together}
        if self.version is not None:
            for name, uses_suffixes in (("livedraft_speculative", False), ("livedraft_with_suffixes", True)):
                found[name] = Contender(self.llm, self.version, sampling, uses_suffixes=uses_suffixes).together
        found["transformers_generate"] = self._transformers.contender(sampling)
        if self._draft_folder is None:
            reasons["transformers_assisted"] = _NO_DRAFT
        elif batch > 1:
            reasons["transformers_assisted"] = "transformers takes an assistant at batch 1 only"
        else:
            found["transformers_assisted"] = self._transformers.contender(sampling, self._draft_folder)
        for name, server in self._servers.items():
            found[name] = server.contender(sampling)
        for name, engine in self._vllm.items():
            if name == "vllm_speculative" and engine.device == "cpu" and sampling.temperature > 0:
                reasons[name] = "vLLM's CPU build reads uninitialised sampling parameters when it speculates"
            else:
                found[name] = engine.contender(sampling)
        if self._llama is None:
            reasons |= dict.fromkeys(_named("llama_cpp"), "no --llama-server")
        if not self._vllm:
            reasons |= dict.fromkeys(_named("vllm"), "no --vllm-python")
        return found, {name: reasons.get(name, _NO_DRAFT) for name in ENGINES if name not in found}

    def drafted_nothing(self) -> dict[str, str]:
        """A server that was to speculate and did not: its speed is another plain decoding's."""
        server = self._servers.get("llama_cpp_speculative")
        if server is None or server.num_drafted:
            return {}
        return {"llama_cpp_speculative": "llama.cpp's server drafted nothing with the flags in `commands`"}

    def acceptance(self) -> dict[str, float]:
        """Of llama.cpp in this setting, warming up included: whether it speculates at all shows here."""
        servers = {name: server for name, server in self._servers.items() if server.num_drafted}
        return {name: round(server.num_accepted / server.num_drafted, 3) for name, server in servers.items()}


def _named(engine: str) -> list[str]:
    return [name for name in ENGINES if name.startswith(engine)]


def _setting(
    arena: _Arena, groups: Sequence[Group], sampling: SamplingParams, batch: int, rounds: int
) -> dict[str, Any]:
    contenders, not_run = arena.contenders(sampling, batch)
    bar = Bar()
    for answer in contenders.values():  # warm up: caches and code paths
        answer(groups[0])
    timings = alternate(
        {name: joined(answer) for name, answer in contenders.items()},
        groups,
        num_rounds=rounds,
        report=bar,
        name=f"batch {batch}, temperature {sampling.temperature:g}",
        rest_seconds=_REST_SECONDS,
    )
    bar.stop()
    for name, timing in timings.items():
        _require_tokens(name, timing)
    not_run |= arena.drafted_nothing()
    timings = {name: timing for name, timing in timings.items() if name not in not_run}
    speeds = {name: median_with_interval(timing.answer_speeds()) for name, timing in timings.items()}
    return {
        **{name: round(speeds[name][0], 1) if name in speeds else None for name in ENGINES},
        "intervals": {name: [round(low, 1), round(high, 1)] for name, (_, low, high) in speeds.items()},
        "over_livedraft_plain": _ratios(timings),
        "same_output": _same_output(timings) if sampling.is_greedy and batch == 1 else None,
        "acceptance_rate": arena.acceptance(),
        "not_run": not_run,
        "batch": batch,
        "temperature": sampling.temperature,
        "prompts": len(groups) * batch,
        "pairs": len(groups) * rounds,
    }


def _ratios(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """Median of all pairs with its 95 % interval; below 1 livedraft's plain decoding is faster."""
    plain = timings["livedraft_plain"]
    ratios = {name: median_with_interval(timing.pair_ratios(plain)) for name, timing in timings.items()}
    return {
        name: {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}
        for name, (median, low, high) in ratios.items()
    }


def _same_output(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """Beside livedraft's plain decoding: answers that are the same, and the mean share of an answer before the first
    difference. Where engines add up in another order, near ties part the texts of one model too."""
    plain = timings["livedraft_plain"].outputs
    return {name: _sameness(plain, timing.outputs) for name, timing in timings.items()}


def _sameness(plain: Sequence[list[int]], other: Sequence[list[int]]) -> dict[str, float]:
    pairs = list(zip(plain, other, strict=True))
    shares = []
    for ours, theirs in pairs:
        agreed = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        shares.append(agreed / max(len(ours), len(theirs)))
    return {
        "identical": sum(ours == theirs for ours, theirs in pairs),
        "of": len(pairs),
        "share_before_difference": round(sum(shares) / len(shares), 3),
    }


def _require_tokens(name: str, timing: Timing) -> None:
    """An engine that answered nothing would look infinitely slow, and its pairs could not be divided."""
    if any(count == 0 for counts in timing.num_tokens for count in counts):
        raise UserError(f"{name} answered a prompt with nothing; its speed cannot be told.")


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for setting in result["settings"]:
        table = Table(
            "engine", "tokens/s", "× livedraft plain", "same output",
            title=f"batch {setting['batch']}, temperature {setting['temperature']:g}, {setting['pairs']} interleaved pairs",
        )  # fmt: skip
        for name in ENGINES:
            if setting[name] is None:
                table.add_row(name, "not run", setting["not_run"][name], "")
                continue
            low, high = setting["intervals"][name]
            ratio, same = setting["over_livedraft_plain"][name], (setting["same_output"] or {}).get(name)
            table.add_row(
                name, f"{setting[name]:.1f} [{low:.1f}, {high:.1f}]",
                f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
                f"{same['identical']} of {same['of']}" if same else "",
            )  # fmt: skip
        console.print(table)
    console.print(f"{result['execution']}; draft {result['draft_version']}; {result['versions']}; {result['hardware']}")
