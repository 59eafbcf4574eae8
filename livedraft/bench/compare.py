"""`livedraft bench compare`: the same target weights and prompts through livedraft and through the engines one would take
instead.

One interleaved run at batch 1: every engine answers a prompt before the next prompt comes, in rotating order. What is not
installed, or not named, is null in the result. llama.cpp runs as its own server, started here with the same number of threads
on the weights that `livedraft export-target` writes, and once more on the model's own file where that is quantised: another
model, and so its own row.
"""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from livedraft.bench.alternate import Timing, alternate, median_with_lower_bound
from livedraft.bench.contender import Contender
from livedraft.bench.progress import Bar
from livedraft.bench.prompts import read_prompts
from livedraft.bench.speed import transformers_generate
from livedraft.draft_source import is_whole_model
from livedraft.llm import LLM
from livedraft.models.export_gguf import export_gguf
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams, UserError

Answer = Callable[[list[int]], list[int]]
ENGINES = (
    "livedraft_plain", "livedraft_speculative", "livedraft_with_suffixes", "transformers_generate", "transformers_assisted",
    "llama_cpp_plain",
    "llama_cpp_own_file", "llama_cpp_speculative", "vllm_plain", "vllm_speculative",
)  # fmt: skip
_START_SECONDS = 120.0


def run(
    prompts_path: Path, *, limit: int, max_tokens: int, temperature: float, rounds: int, draft: str, state: Path | None,
    model: str, dtype: str, threads: int | None, llama_server: Path | None, llama_draft: Path | None, assistant: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    prompts = read_prompts(prompts_path, limit)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    bar = Bar()
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(model, draft=draft, state=state, dtype=dtype, num_threads=threads))
        version = draft if is_whole_model(draft) else llm.engine.draft_version if llm.engine.draft else None
        token_ids = [llm.tokenizer.encode_chat(messages) for messages in prompts]
        contenders: dict[str, Answer] = {"livedraft_plain": Contender(llm, None, sampling)}
        if version is not None:
            contenders["livedraft_speculative"] = Contender(llm, version, sampling)
            contenders["livedraft_with_suffixes"] = Contender(llm, version, sampling, uses_suffixes=True)
        contenders["transformers_generate"] = transformers_generate(llm, model, max_tokens, temperature)
        if assistant is not None:
            contenders["transformers_assisted"] = transformers_generate(llm, model, max_tokens, temperature, assistant)
        versions: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
        if llama_server is not None:
            versions["llama_cpp"] = _llama_version(llama_server)
            contenders |= _llama_contenders(stack, llama_server, llama_draft, model, sampling, torch.get_num_threads())
        for answer in contenders.values():  # warm up: caches and code paths
            answer(token_ids[0])
        timings = alternate(contenders, token_ids, num_rounds=rounds, report=bar)
        bar.stop()
        for name, timing in timings.items():
            _require_tokens(name, timing)
        result = {
            **{name: _speed(timings.get(name)) for name in ENGINES},
            "over_livedraft_plain": _ratios(timings),
            "execution": llm.path.description,
            "draft_version": version,
            "versions": versions,
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "prompts": len(prompts),
            "pairs": len(prompts) * rounds,
        }
    print(json.dumps(result) if as_json else _table(result))


def _speed(timing: Timing | None) -> float | None:
    return None if timing is None else round(timing.tokens_per_second(), 1)


def _ratios(timings: dict[str, Timing]) -> dict[str, dict[str, float]]:
    """Median of all pairs with its lower 95 % bound; below 1 livedraft's plain decoding is faster."""
    plain = timings["livedraft_plain"]
    ratios = {name: median_with_lower_bound(timing.pair_ratios(plain)) for name, timing in timings.items()}
    return {name: {"median": round(median, 3), "low": round(low, 3)} for name, (median, low) in ratios.items()}


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['execution']}; {result['pairs']} pairs at batch 1, interleaved; draft {result['draft_version']}"]
    for name in ENGINES:
        ratio = result["over_livedraft_plain"].get(name)
        shown = (
            "not run" if ratio is None else f"{result[name]:7.1f} tokens/s   x {ratio['median']:.2f} of livedraft plain"
        )
        lines.append(f"{name:>24}  {shown}")
    return "\n".join(lines)


# --- llama.cpp ------------------------------------------------------------------------------------------------------


def _llama_version(server: Path) -> str:
    try:
        found = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise UserError(
            f"{server} cannot be run ({error.strerror}); give llama.cpp's server with --llama-server."
        ) from error
    return (found.stderr + found.stdout).strip().splitlines()[0]


def _llama_contenders(
    stack: ExitStack, server: Path, draft: Path | None, model: str, sampling: SamplingParams, threads: int
) -> dict[str, Answer]:
    own = resolve_model(model)
    if own.suffix != ".gguf":
        raise UserError("bench compare runs llama.cpp on GGUF models only.")
    plain = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "target-bf16.gguf"
    export_gguf(model, plain, type="bf16")

    def started(file: Path, *more: str) -> Answer:
        url = stack.enter_context(_llama_server(server, file, threads, *more))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        return lambda prompt: _llama_answer(client, prompt, sampling)

    contenders = {"llama_cpp_plain": started(plain), "llama_cpp_own_file": started(own)}
    if draft is not None:
        contenders["llama_cpp_speculative"] = started(plain, "--model-draft", str(draft))
    return contenders


@contextmanager
def _llama_server(server: Path, file: Path, threads: int, *more: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(server), "--model", str(file), "--port", str(port), "--threads", str(threads), "--ctx-size", "4096",
               "--parallel", "1", *more]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise UserError(
                    f"llama.cpp's server ended at once (exit code {process.returncode}): {' '.join(command)}"
                )
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        else:
            raise UserError(f"llama.cpp's server was not ready within {_START_SECONDS:.0f} s: {' '.join(command)}")
        yield url
    finally:
        process.terminate()
        process.wait()


def _llama_answer(client: httpx.Client, prompt: list[int], sampling: SamplingParams) -> list[int]:
    body = {"prompt": prompt, "n_predict": sampling.max_tokens, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0,
            "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False, "return_tokens": True}  # fmt: skip
    reply = client.post("/completion", json=body).json()
    tokens: list[int] = reply.get("tokens") or [0] * int(reply["tokens_predicted"])
    return tokens


def _require_tokens(name: str, timing: Timing) -> None:
    """An engine that answered nothing would look infinitely slow, and its pairs could not be divided."""
    if any(count == 0 for counts in timing.num_tokens for count in counts):
        raise UserError(f"{name} answered a prompt with nothing; its speed cannot be told.")
