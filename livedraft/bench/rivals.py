"""The engines one would take instead of livedraft, behind one call: prompts answered together -> their output token ids.

transformers runs in this process. llama.cpp runs as its own server, started here with the same number of threads; vLLM in an
interpreter of its own, over a pipe.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from livedraft.bench import vllm_side
from livedraft.bench.reference import transformers_model
from livedraft.llm import LLM
from livedraft.models.native import fitted
from livedraft.models.open import open_model
from livedraft.models.pull import resolve_model
from livedraft.records import SamplingParams, UserError

Group = Sequence[list[int]]
Answer = Callable[[Group], list[list[int]]]
_START_SECONDS = 120.0


# --- transformers ---------------------------------------------------------------------------------------------------


class Transformers:
    """transformers' own generate with the same weights and threads, in the dtype that is its fastest here."""

    def __init__(self, llm: LLM, model: str) -> None:
        self.dtype = fitted(llm.path, None).dtype
        plain = replace(llm.path, is_compiled=False, is_prepacked=False, is_int8=False, is_int4=False)
        opened = open_model(resolve_model(model), plain)
        self._model = opened.hf_model
        if opened.native is not None:
            self._model = transformers_model(opened.native.tensors, opened.native.config, self.dtype)
        self._eos = list(llm.tokenizer.eos_token_ids)

    def contender(self, sampling: SamplingParams, assistant: Path | None = None) -> Answer:
        """`assistant` is a draft for it, as a folder; transformers takes one at batch 1 only."""
        helper = None
        if assistant is not None:
            helper = transformers.AutoModelForCausalLM.from_pretrained(
                assistant, dtype=self.dtype, local_files_only=True
            )
        how: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}

        def answer(group: Group) -> list[list[int]]:
            longest = max(map(len, group))
            mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in group])
            prompts_BT = torch.tensor([[self._eos[0]] * (longest - len(prompt)) + prompt for prompt in group])
            output_BT = self._model.generate(
                prompts_BT,
                attention_mask=mask_BT,
                max_new_tokens=sampling.max_tokens,
                assistant_model=helper,
                eos_token_id=self._eos,
                pad_token_id=self._eos[0],
                **how,
            )
            return [_up_to_end(row, self._eos) for row in output_BT[:, longest:].tolist()]

        return answer


def _up_to_end(token_ids: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    end = next((index for index, token in enumerate(token_ids) if token in eos_token_ids), len(token_ids))
    return token_ids[: end + 1]


# --- llama.cpp ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LlamaServer:
    """One running server of llama.cpp."""

    client: httpx.Client
    pool: ThreadPoolExecutor
    command: list[str]
    num_drafted: int = 0
    num_accepted: int = 0

    def contender(self, sampling: SamplingParams) -> Answer:
        self.num_drafted = self.num_accepted = 0
        return lambda group: list(self.pool.map(lambda prompt: self._answer(prompt, sampling), group))

    def _answer(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        body = {"prompt": prompt, "n_predict": sampling.max_tokens, "temperature": sampling.temperature, "top_k": 0,
                "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False, "return_tokens": True}  # fmt: skip
        reply = self.client.post("/completion", json=body).json()
        if "tokens_predicted" not in reply:
            raise UserError(f"llama.cpp's server refused a prompt: {json.dumps(reply)[:200]}")
        timings = reply.get("timings", {})
        self.num_drafted += timings.get("draft_n", 0)
        self.num_accepted += timings.get("draft_n_accepted", 0)
        tokens: list[int] = reply.get("tokens") or [0] * int(reply["tokens_predicted"])
        return tokens


def llama_version(server: Path) -> str:
    try:
        found = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise UserError(
            f"{server} cannot be run ({error.strerror}); give llama.cpp's server with --llama-server."
        ) from error
    lines = (found.stderr + found.stdout).strip().splitlines()
    return next((line for line in lines if "version" in line), lines[0] if lines else "unknown")


def llama_draft_flags(server: Path, draft: Path) -> tuple[str, ...]:
    """What makes this server draft with that file. To newer ones naming a draft is not enough: without
    `--spec-type` they load it and never use it."""
    asked = subprocess.run([str(server), "--help"], capture_output=True, text=True, timeout=60, check=False)
    kind = ("--spec-type", "draft-simple") if "--spec-type" in asked.stdout + asked.stderr else ()
    return ("--model-draft", str(draft), *kind)


@contextmanager
def llama_server(server: Path, file: Path, *more: str, threads: int, batch: int) -> Iterator[LlamaServer]:
    """Started, ready, and stopped at the end. Raises UserError when it does not come up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(server), "--model", str(file), "--port", str(port), "--threads", str(threads), "--ctx-size",
               str(4096 * batch), "--parallel", str(batch), *more]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _is_ready(url):
            if process.poll() is not None:
                raise UserError(
                    f"llama.cpp's server ended at once (exit code {process.returncode}): {' '.join(command)}"
                )
            if time.monotonic() > deadline:
                raise UserError(f"llama.cpp's server was not ready within {_START_SECONDS:.0f} s: {' '.join(command)}")
            time.sleep(0.2)
        with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(batch) as pool:
            yield LlamaServer(client=client, pool=pool, command=command)
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


# --- vLLM -----------------------------------------------------------------------------------------------------------


class Vllm:
    """vLLM in its own interpreter."""

    def __init__(self, process: subprocess.Popen[str], eos_token_ids: Sequence[int]) -> None:
        self._process, self._eos = process, list(eos_token_ids)
        self.version = ""
        self.device = ""

    def contender(self, sampling: SamplingParams) -> Answer:
        asked = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "eos_token_ids": self._eos}
        return lambda group: self.ask(asked | {"prompts": list(group)})["outputs"]

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError("vLLM ended without an answer.")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def vllm_engine(python: Path, log: Path, eos_token_ids: Sequence[int], **settings: Any) -> Iterator[Vllm]:
    """Started and ready; its output goes to `log`. Raises UserError when it does not come up."""
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("w", encoding="utf-8"))
        try:
            process = subprocess.Popen(
                [str(python), "-u", vllm_side.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(
                f"{python} cannot be run ({error.strerror}); give vLLM's interpreter with --vllm-python."
            ) from error
        stack.enter_context(process)  # closes the pipes and waits
        stack.callback(process.terminate)
        engine = Vllm(process, eos_token_ids)
        try:
            ready = engine.ask(settings)
        except UserError as error:
            lines = log.read_text(encoding="utf-8").strip().splitlines()
            raise UserError(f"vLLM did not start: {lines[-1] if lines else 'it said nothing'}") from error
        engine.version, engine.device = ready["version"], ready["device"]
        yield engine
