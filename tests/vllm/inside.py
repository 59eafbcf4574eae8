"""Runs in vLLM's own interpreter: one engine in this process, asked many things; prints one JSON object.

    python tests/vllm/inside.py ORDERS    # JSON: target, draft, k, and the checks to make

What is asserted about the answers stands in the tests that start this.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
_STRANGERS = ("numpy", "pydantic", "fastapi", "httpx", "typer", "transformers", "vllm")


def imported_by_the_extension() -> list[str]:
    """Of what only the parent may need; before vLLM has imported all of it anyway."""
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401 - its own imports are no concern

    before = set(sys.modules)
    import livedraft.integrations.vllm.worker_extension  # noqa: F401

    new = set(sys.modules) - before
    return sorted(name for name in new if "." not in name and name in _STRANGERS) + sorted(
        name for name in new if name.startswith("livedraft.") and not name.startswith("livedraft.integrations")
    )


def rss_mb() -> float:
    import gc

    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Engine:
    def __init__(self, orders: dict) -> None:
        from vllm import LLM

        self.num_named = 0
        speculative = None
        if orders.get("draft"):
            speculative = {
                "method": "draft_model", "model": orders["draft"], "num_speculative_tokens": orders["k"],
                "draft_sample_method": "probabilistic",
            }  # fmt: skip
        self.llm = LLM(
            model=orders["target"], speculative_config=speculative, max_model_len=orders.get("max_model_len", 512),
            kv_cache_memory_bytes=orders.get("kv_mb", 128) * 2**20, enforce_eager=True, dtype="bfloat16",
            disable_log_stats=False, seed=0, per_request_spec_decode_metrics="detailed" if speculative else "none",
            worker_extension_cls="livedraft.integrations.vllm.worker_extension.WorkerExtension",
        )  # fmt: skip

    def rpc(self, method: str, *arguments: str):
        return self.llm.collective_rpc(method, args=arguments)[0]

    def run(self, prompts: list[list[int]], **sampling) -> list:
        """Under names as the parent gives them."""
        from vllm import SamplingParams

        name = sampling.pop("name", None)
        parameters = SamplingParams(**{"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, **sampling})
        engine = self.llm.llm_engine
        for prompt in prompts:
            self.num_named += 1
            id = f"{name or 'livedraft-'}{self.num_named:032x}"
            engine.add_request(id, {"prompt_token_ids": prompt}, parameters)
        finished = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output
        engine.step()  # the workers learn of what has ended
        return [finished[name] for name in sorted(finished)]

    def swap(self, file: str, version: str) -> dict:
        import hashlib

        order = {"version": version, "source": file, "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest()}
        self.rpc("livedraft_stage", json.dumps(order))
        while True:
            staged = self.rpc("livedraft_staged", version)
            if staged["problem"]:
                return {"refused": staged["problem"]}
            if staged["version"]:
                break
            time.sleep(0.01)
        report = self.rpc("livedraft_swap", version)
        self.llm.reset_prefix_cache()
        return report


def texts(outputs: list) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def acceptance(outputs: list) -> float:
    counted = [output.outputs[0].spec_decode_metrics.to_dict() for output in outputs]
    drafted = sum(one["num_draft_tokens"] for one in counted)
    return sum(one["num_accepted_draft_tokens"] for one in counted) / max(1, drafted)


def plain(value):
    """Tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def main() -> None:
    orders = json.loads(sys.argv[1])
    report: dict = {"strangers": imported_by_the_extension()}
    started = time.monotonic()
    engine = Engine(orders)
    report["start_seconds"] = round(time.monotonic() - started, 1)
    report["probe"] = engine.rpc("livedraft_probe")
    for step in orders["steps"]:
        kind = step.pop("do")
        name = step.pop("as", kind)
        report[name] = _STEPS[kind](engine, **step)
    sys.stdout.flush()
    print("REPORT " + json.dumps(report))


def do_start(engine: Engine, **settings) -> dict:
    return engine.rpc("livedraft_start", json.dumps(settings))


def do_generate(engine: Engine, prompts: list, **sampling) -> dict:
    outputs = engine.run(prompts, **sampling)
    has_metrics = getattr(outputs[0].outputs[0], "spec_decode_metrics", None) is not None
    return {"texts": texts(outputs), "acceptance": acceptance(outputs) if has_metrics else None}


def do_collect(engine: Engine) -> list:
    time.sleep(0.5)
    return [{name: plain(value) for name, value in one.items()} for one in engine.rpc("livedraft_collect")]


def do_swap(engine: Engine, file: str, version: str) -> dict:
    return engine.swap(file, version)


def do_many_swaps(engine: Engine, files: list, prompts: list, count: int) -> list:
    """Memory after each swap and a few tokens."""
    memory = []
    for number in range(count):
        report = engine.swap(files[number % len(files)], f"m{number}")
        assert "seconds" in report, report
        engine.run(prompts, max_tokens=8)
        memory.append(rss_mb())
    return memory


def do_tap(engine: Engine, is_on: str) -> dict:
    return engine.rpc("livedraft_tap", is_on)


def do_tap_cost(engine: Engine, prompts: list, pairs: int, max_tokens: int) -> dict:
    """Tokens a second with the tap off and on, by turns; which comes first alternates."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    engine.run(prompts, max_tokens=max_tokens)
    for number in range(pairs):
        for state in ("on", "off") if number % 2 else ("off", "on"):
            engine.rpc("livedraft_tap", state)
            started = time.perf_counter()
            outputs = engine.run(prompts, max_tokens=max_tokens)
            rates[state].append(sum(map(len, texts(outputs))) / (time.perf_counter() - started))
    engine.rpc("livedraft_tap", "on")
    return rates


def do_report(engine: Engine) -> dict:
    return engine.rpc("livedraft_report")


_STEPS = {name.removeprefix("do_"): value for name, value in list(globals().items()) if name.startswith("do_")}

if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
