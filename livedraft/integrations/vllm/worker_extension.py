"""livedraft's part of a vLLM worker: `--worker-extension-cls livedraft.integrations.vllm.worker_extension.WorkerExtension`.

Its methods are called through vLLM's `collective_rpc`, in the worker's process, between two steps; arguments are JSON, answers
are plain dictionaries. Runs inside vLLM: standard library, torch, safetensors and `livedraft.records`; vLLM is imported only in
the functions that need it, and nothing of it is touched before `livedraft_probe` has looked.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from livedraft.integrations.vllm.sampling_guard import guard
from livedraft.integrations.vllm.shipping import Shipper
from livedraft.integrations.vllm.tap import Tap
from livedraft.integrations.vllm.weights import Stage, SwapError, prepare, swap
from livedraft.integrations.vllm.wire import PROTOCOL, BadWeightsError, TappedRequest, WeightsManifest, read_manifest

_DRAFT_FILE = "model.safetensors"
_VERIFY_PARAMETERS = ("metadata", "draft_probs", "logits", "sampling_metadata")
_METADATA_FIELDS = ("draft_token_ids", "num_draft_tokens")
_RUNNER_ATTRIBUTES = (
    "_sample",
    "execute_model",
    "input_batch",
    "requests",
    "discard_request_mask",
    "use_async_scheduling",
)
_BATCH_ATTRIBUTES = ("req_ids", "num_tokens_no_spec", "num_prompt_tokens")


class _State:
    """What the extension keeps of one worker."""

    def __init__(self) -> None:
        self.tap: Tap | None = None
        self.shipper: Shipper | None = None
        self.stage: Stage | None = None
        self.version = "none"
        self.failure = ""
        """Set once a swap went wrong after it had begun."""
        self.sampling: str | None = None
        self.collected: list[TappedRequest] = []


class WorkerExtension:
    """Mixed into vLLM's worker class, so nothing here may have a name that the worker has."""

    livedraft_memory: _State | None = None

    def livedraft_probe(self) -> dict[str, Any]:
        """What is here, and in `problems` one sentence for each thing that is not as this extension knows it. On a CPU the
        sampler is tested, and mended if that is needed."""
        import vllm

        worker: Any = self
        state = _state(worker)
        runner = worker.model_runner
        draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
        if state.sampling is None:
            state.sampling = _guard_sampling(worker)
        speculative = worker.vllm_config.speculative_config
        return {
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "runner": type(runner).__name__,
            "device": str(worker.device.type),
            "rank": int(worker.rank),
            "method": speculative.method if speculative else "none",
            "num_speculative_tokens": int(speculative.num_speculative_tokens) if speculative else 0,
            "has_draft": draft is not None,
            "sampling": state.sampling,
            "problems": _problems(runner),
        }

    def livedraft_start(self, settings: str) -> dict[str, Any]:
        """Tap from now on. `settings`: version (of the resident draft), target (fingerprint), and where finished requests go:
        url and token, or nothing for tests in one process (`livedraft_collect`). Only rank 0 taps."""
        worker: Any = self
        given = json.loads(settings)
        state = _state(worker)
        _stop(state)
        state.version = given["version"]
        draft_config = getattr(worker.vllm_config.speculative_config, "draft_model_config", None)
        state.stage, reason = None, "It was started without a draft."
        if draft_config is not None and worker.get_draft_model() is not None:
            try:
                found = read_manifest(Path(draft_config.model) / _DRAFT_FILE)
                expected = WeightsManifest(tensors=found.tensors, target=given["target"], version=found.version)
                state.stage, reason = Stage(expected), ""
                prepare(worker)
            except BadWeightsError as error:  # a hub's name, or weights in several files
                reason = str(error)
            except ImportError as error:
                state.stage, reason = None, f"This vLLM cannot load a draft's weights anew ({error})."
        if int(worker.rank) == 0:
            state.shipper = Shipper(given["url"], given["token"]) if given.get("url") else None
            deliver = state.shipper.offer if state.shipper else state.collected.append
            share = float(given.get("share", 1.0))
            state.tap = Tap(worker.model_runner, deliver=deliver, version=state.version, share=share)
            state.tap.is_on = bool(given.get("tap", True))
        return {"version": state.version, "can_swap": state.stage is not None, "reason": reason}

    def livedraft_tap(self, is_on: str) -> dict[str, Any]:
        """On or off, live."""
        state = _state(self)
        if state.tap is not None:
            state.tap.is_on = is_on == "on"
        return self.livedraft_report()

    def livedraft_report(self) -> dict[str, Any]:
        """Counters."""
        state = _state(self)
        tap, shipper = state.tap, state.shipper
        return {
            "version": state.version,
            "failure": state.failure,
            "tap": tap is not None and tap.is_on,
            "num_rounds": tap.num_rounds if tap else 0,
            "num_requests": tap.num_requests if tap else 0,
            "num_dropped": (tap.num_dropped_requests if tap else 0) + (shipper.num_dropped if shipper else 0),
            "num_shipped": shipper.num_shipped if shipper else 0,
            "num_bytes": shipper.num_bytes if shipper else 0,
            "last_problem": (tap.problem if tap else "") or (shipper.last_problem if shipper else ""),
        }

    def livedraft_stage(self, order: str) -> dict[str, Any]:
        """Begin to fetch and check a version; `order`: version, source (path or URL), sha256, token. The engine runs on."""
        state = _state(self)
        if state.stage is None:
            return {"problem": "There is no draft here to swap."}
        given = json.loads(order)
        state.stage.begin(
            version=given["version"], source=given["source"], sha256=given["sha256"], token=given.get("token", "")
        )
        return {"problem": ""}

    def livedraft_staged(self, version: str) -> dict[str, Any]:
        """How far that is: `version` is set once it is ready, `problem` when it was refused."""
        stage = _state(self).stage
        if stage is None:
            return {"version": "", "problem": "There is no draft here to swap."}
        is_ready = stage.staged is not None and stage.staged.version == version
        return {"version": version if is_ready else "", "problem": stage.problem}

    def livedraft_swap(self, version: str) -> dict[str, Any]:
        """Load what is staged; the engine must be paused. `refused`: nothing was touched; `failed`: the engine is to be
        restarted."""
        state = _state(self)
        if state.failure:
            return {"failed": state.failure}
        if state.stage is None:
            return {"refused": "There is no draft here to swap."}
        try:
            staged = state.stage.take(version)
        except BadWeightsError as error:
            return {"refused": str(error)}
        try:
            report = swap(self, staged)
        except Exception as error:
            kind = "" if isinstance(error, SwapError) else f"{type(error).__name__}: "
            state.failure = f"{kind}{error}"
            return {"failed": state.failure}
        state.version = version
        if state.tap is not None:
            state.tap.version = version
        return report

    def livedraft_collect(self) -> list[dict[str, Any]]:
        """In one process, for tests: the requests tapped since the last call."""
        state = _state(self)
        collected, state.collected[:] = list(state.collected), []
        return [vars(request) for request in collected]


def _state(worker: Any) -> _State:
    if worker.livedraft_memory is None:
        worker.livedraft_memory = _State()
    state: _State = worker.livedraft_memory
    return state


def _stop(state: _State) -> None:
    if state.tap is not None:
        state.tap.close()
    if state.shipper is not None:
        state.shipper.close()
    state.tap = state.shipper = None


def _guard_sampling(worker: Any) -> str:
    """On a GPU a Triton kernel does it, which was never seen to be wrong."""
    if worker.device.type != "cpu" or worker.vllm_config.speculative_config is None:
        return "fine"
    from vllm.v1.sample import rejection_sampler

    if not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        return "broken"
    return guard(rejection_sampler)


def _problems(runner: Any) -> list[str]:
    """Of the private names that the tap rests on."""
    kind = type(runner).__name__
    if not hasattr(runner, "input_batch") or not hasattr(runner, "_sample"):
        return [
            f"The model runner {kind} is of a kind that cannot be tapped; start vLLM with VLLM_USE_V2_MODEL_RUNNER=0."
        ]
    problems = [f"The model runner has no {name}." for name in _RUNNER_ATTRIBUTES if not hasattr(runner, name)]
    problems += [f"Its batch has no {name}." for name in _BATCH_ATTRIBUTES if not hasattr(runner.input_batch, name)]
    if list(inspect.signature(runner._sample).parameters) != ["logits", "spec_decode_metadata"]:
        problems.append("Its _sample takes other arguments.")
    if hasattr(runner, "rejection_sampler"):
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        taken = tuple(inspect.signature(runner.rejection_sampler.forward).parameters)
        if taken != _VERIFY_PARAMETERS:
            problems.append(f"The rejection sampler takes {', '.join(taken)}.")
        fields = SpecDecodeMetadata.__dataclass_fields__
        problems += [f"Its metadata has no {name}." for name in _METADATA_FIELDS if name not in fields]
    return problems
