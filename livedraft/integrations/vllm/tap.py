"""What the target verified, taken from vLLM's sampling step: one look a round on the engine's thread, the rest on another.

`Tap` wraps two methods of the model runner (V1): `_sample`, through which all logits that become tokens pass, and
`execute_model`, which learns of finished requests. A round is copied into a bounded queue; when the queue is full the round is
dropped, and with it the whole request it belongs to: half a text teaches nothing. On a CPU the copy is the raw logits, and the
top tokens are found on the other thread; on a GPU they are found on the device and copied without waiting.

Runs inside vLLM: standard library, torch, `livedraft.records` and `wire` only.

Legend: B requests of a round, R logit rows (a request's drafted positions, then one more), V vocabulary, K teacher tokens,
T output positions, P drafted positions.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from livedraft.integrations.vllm.wire import PRIVATE_ID_PREFIX, REQUEST_ID_PREFIX, TappedRequest
from livedraft.records import TEACHER_TOP_K

MAX_QUEUED_ROUNDS = 64
"""Of raw logits each on a CPU: a few hundred MB at the very worst."""
MAX_OPEN_REQUESTS = 4096
"""Requests whose end never comes must not fill memory."""


@dataclass(kw_only=True)
class _Round:
    """One sampling step as the engine's thread leaves it."""

    request_ids: list[str]
    kept: list[int]
    """Indices of the requests that are recorded."""
    num_drafted_B: list[int]
    first_position_B: list[int]
    """Output position of each request's first row; −1 where the engine does not know it yet."""
    version: str
    sampled_BS: torch.Tensor
    draft_token_ids_P: torch.Tensor | None
    draft_log_probs_P: torch.Tensor | None
    logits_RV: torch.Tensor | None
    reduced: _Reduced | None
    is_copied: Any = None
    """On a GPU, the event after which the tensors may be read."""
    new_requests: dict[str, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Reduced:
    """What is kept of R rows of logits."""

    token_ids_RK: torch.Tensor
    log_probs_RK: torch.Tensor
    tail_mass_R: torch.Tensor
    drafted_log_prob_R: torch.Tensor
    """The target's log-probability of the token drafted at that row."""

    def to_cpu(self) -> _Reduced:
        return _Reduced(**{name: tensor.to("cpu", non_blocking=True) for name, tensor in vars(self).items()})


def reduced(logits_RV: torch.Tensor, drafted_token_ids_R: torch.Tensor, top_rows: list[int] | None = None) -> _Reduced:
    """The K likeliest tokens, the mass of all others, and the drafted token, of each row; the first two only of `top_rows`
    where those that became output are known already."""
    R, K = len(logits_RV), min(TEACHER_TOP_K, logits_RV.shape[-1])
    rows = torch.arange(R, device=logits_RV.device) if top_rows is None else torch.tensor(top_rows)
    top = logits_RV[rows].topk(K, dim=-1)
    logits_RV = logits_RV.float()
    normaliser_R1 = logits_RV.logsumexp(-1, keepdim=True)
    log_probs = top.values.float() - normaliser_R1[rows]
    drafted_R1 = logits_RV.gather(-1, drafted_token_ids_R.long()[:, None]) - normaliser_R1
    found = _Reduced(
        token_ids_RK=torch.zeros(R, K, dtype=torch.int32, device=logits_RV.device),
        log_probs_RK=torch.zeros(R, K, dtype=torch.float16, device=logits_RV.device),
        tail_mass_R=torch.zeros(R, device=logits_RV.device),
        drafted_log_prob_R=drafted_R1[:, 0],
    )
    found.token_ids_RK[rows] = top.indices.int()
    found.log_probs_RK[rows] = log_probs.half()
    found.tail_mass_R[rows] = (1.0 - log_probs.exp().sum(-1)).clamp(min=0.0)
    return found


class Tap:
    """Counters are read by another thread; each is written by one alone."""

    def __init__(
        self, runner: Any, *, deliver: Callable[[TappedRequest], None], version: str, share: float = 1.0
    ) -> None:
        """`deliver` gets each finished request, on the tap's own thread. Until `is_on` nothing is looked at; then `share` of
        the requests, by a hash of their ids."""
        self._runner, self._deliver, self._share = runner, deliver, share
        self.version = version
        self.is_on = False
        self.problem = ""
        self.num_rounds = self.num_dropped_rounds = self.num_dropped_requests = self.num_requests = 0
        self._known: set[str] = set()
        """Requests of which the other thread has prompt and parameters."""
        self._broken: set[str] = set()
        """Requests that a round is missing of."""
        self._open: dict[str, _Assembly] = {}
        self._draft_probs: torch.Tensor | None = None
        self._queue: queue.Queue[_Round | list[str] | None] = queue.Queue(maxsize=MAX_QUEUED_ROUNDS)
        self._sample, self._execute = runner._sample, runner.execute_model
        self._verify = runner.rejection_sampler.forward if hasattr(runner, "rejection_sampler") else None
        runner._sample, runner.execute_model = self._tapped_sample, self._tapped_execute
        if self._verify is not None:
            runner.rejection_sampler.forward = self._tapped_verify
        self._thread = threading.Thread(target=self._assemble, name="livedraft-tap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The runner as it was; what is queued is still delivered."""
        self.is_on = False
        self._runner._sample, self._runner.execute_model = self._sample, self._execute
        if self._verify is not None:
            self._runner.rejection_sampler.forward = self._verify
        self._queue.put(None)
        self._thread.join(5.0)

    # --- on the engine's thread -------------------------------------------------------------------------------------

    def _tapped_execute(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        finished = self._known.intersection(scheduler_output.finished_req_ids)
        if finished:
            self._known -= finished
            self._put(sorted(finished))
        return self._execute(scheduler_output, *arguments, **options)

    def _tapped_verify(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        self._draft_probs = draft_probs
        assert self._verify is not None
        return self._verify(metadata, draft_probs, logits, sampling_metadata)

    def _tapped_sample(self, logits: torch.Tensor | None, metadata: Any) -> Any:
        this = None
        if self.is_on and logits is not None:
            try:
                this = self._look(logits, metadata)
            except Exception as error:
                self._fail(error)
        self._draft_probs = None
        output = self._sample(logits, metadata)
        if this is not None:
            try:
                self._keep(this, output.sampled_token_ids, metadata)
            except Exception as error:
                self._fail(error)
        self._draft_probs = None
        return output

    def _fail(self, error: Exception) -> None:
        """Whatever is wrong with the tap, serving goes on without it."""
        self.is_on, self.problem = False, f"The tap failed and is off: {type(error).__name__}: {error}"

    def _look(self, logits_RV: torch.Tensor, metadata: Any) -> _Round | None:
        """Before sampling, which may write over the logits."""
        runner, batch = self._runner, self._runner.input_batch
        ids = list(batch.req_ids)
        discarded = runner.discard_request_mask.np
        kept = [index for index, one in enumerate(ids) if not discarded[index] and self._wants(one)]
        if not kept:
            return None
        new = {}
        for index in kept:
            if ids[index] not in self._known:
                state = runner.requests[ids[index]]
                new[ids[index]] = (state.prompt_token_ids, _sampling_fields(state.sampling_params))
                self._known.add(ids[index])
        num_drafted = [0] * len(ids) if metadata is None else list(metadata.num_draft_tokens)
        is_async = runner.use_async_scheduling
        starts = [-1 if is_async else int(batch.num_tokens_no_spec[i] - batch.num_prompt_tokens[i]) for i in kept]
        this = _Round(
            request_ids=ids, kept=kept, num_drafted_B=num_drafted, first_position_B=starts, version=self.version,
            sampled_BS=logits_RV, draft_token_ids_P=None, draft_log_probs_P=None, logits_RV=None, reduced=None,
            new_requests=new,
        )  # fmt: skip
        drafted_ids_P = None if metadata is None else metadata.draft_token_ids
        if logits_RV.device.type == "cpu":
            this.logits_RV = logits_RV.clone()
            this.draft_token_ids_P = None if drafted_ids_P is None else drafted_ids_P.clone()
        else:
            drafted_R = _rows_of_drafted(num_drafted, drafted_ids_P, logits_RV.device)
            this.reduced = reduced(logits_RV, drafted_R).to_cpu()
            this.draft_token_ids_P = None if drafted_ids_P is None else drafted_ids_P.to("cpu", non_blocking=True)
        return this

    def _wants(self, request_id: str) -> bool:
        """Private ones are not looked at, nor what a grammar has masked: those are not the target's own logits."""
        if PRIVATE_ID_PREFIX in request_id or request_id in self._broken:
            return False
        if request_id in self._known:
            return True
        state = self._runner.requests[request_id]
        parameters = state.sampling_params
        return (
            REQUEST_ID_PREFIX in request_id
            and bool(state.prompt_token_ids)
            and not state.output_token_ids  # its beginning was missed
            and parameters is not None
            and zlib.crc32(request_id.encode()) < self._share * 2**32
            and getattr(parameters, "structured_outputs", None) is None
        )

    def _keep(self, this: _Round, sampled_BS: torch.Tensor, metadata: Any) -> None:
        if self._draft_probs is not None and metadata is not None:
            rows = torch.arange(len(metadata.draft_token_ids), device=self._draft_probs.device)
            chosen_P = self._draft_probs[rows, metadata.draft_token_ids.long()].float().log()
            this.draft_log_probs_P = chosen_P.to("cpu", non_blocking=True)
        if sampled_BS.device.type == "cpu":
            this.sampled_BS = sampled_BS.clone()
        else:
            this.sampled_BS = sampled_BS.to("cpu", non_blocking=True)
            this.is_copied = torch.cuda.Event()
            this.is_copied.record()
        self.num_rounds += 1
        if not self._put(this):
            self.num_dropped_rounds += 1
            for index in this.kept:
                self._drop(this.request_ids[index])

    def _put(self, item: _Round | list[str]) -> bool:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if isinstance(item, list):
                for request_id in item:
                    self._drop(request_id)
                    self._broken.discard(request_id)  # it is over
            return False
        return True

    def _drop(self, request_id: str) -> None:
        """Its text has a hole. The other thread forgets what it has when it sees the request's end, or at the latest when it
        holds too many."""
        if request_id not in self._broken:
            self._broken.add(request_id)
            self.num_dropped_requests += 1

    # --- on the tap's thread ----------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, list):
                for request_id in item:
                    self._finish(request_id)
            else:
                try:
                    self._add(item)
                except Exception:  # one strange round must not end all learning
                    for index in item.kept:
                        self._drop(item.request_ids[index])

    def _finish(self, request_id: str) -> None:
        assembly = self._open.pop(request_id, None)
        if request_id in self._broken:
            self._broken.discard(request_id)
        elif assembly is not None and assembly.num_outputs:
            self.num_requests += 1
            self._deliver(assembly.finish(request_id))

    @torch.inference_mode()
    def _add(self, this: _Round) -> None:
        if this.is_copied is not None:
            this.is_copied.synchronize()
        for request_id, (prompt, sampling) in this.new_requests.items():
            self._open[request_id] = _Assembly(prompt, sampling, this.version)
        while len(self._open) > MAX_OPEN_REQUESTS:
            del self._open[next(iter(self._open))]
        sampled = [[token for token in row if token >= 0] for row in this.sampled_BS.tolist()]
        first_row_B, first_drafted_B, row, drafted = [], [], 0, 0
        for count in this.num_drafted_B:
            first_row_B.append(row)
            first_drafted_B.append(drafted)
            row, drafted = row + count + 1, drafted + count
        found = this.reduced
        if found is None:
            assert this.logits_RV is not None
            drafted_R = _rows_of_drafted(this.num_drafted_B, this.draft_token_ids_P, torch.device("cpu"))
            tops = [first_row_B[index] + n for index in this.kept for n in range(len(sampled[index]))]
            found = reduced(this.logits_RV, drafted_R, tops)
        for index, start in zip(this.kept, this.first_position_B, strict=True):
            request_id = this.request_ids[index]
            assembly = self._open.get(request_id)
            if assembly is None or request_id in self._broken:
                continue
            if start not in (-1, assembly.num_outputs):  # the engine took something back, or a round was missed
                self._drop(request_id)
                continue
            first, count = first_row_B[index], this.num_drafted_B[index]
            drafted_rows = slice(first_drafted_B[index], first_drafted_B[index] + count)
            assembly.add(
                sampled[index], found, first, this.version,
                drafted_ids=None if this.draft_token_ids_P is None else this.draft_token_ids_P[drafted_rows],
                drafted_log_probs=None if this.draft_log_probs_P is None else this.draft_log_probs_P[drafted_rows],
            )  # fmt: skip


def _rows_of_drafted(
    num_drafted_B: list[int], drafted_ids_P: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """The drafted token of each logit row; 0 for a request's last row, where nothing was drafted."""
    drafted_R = torch.zeros(sum(num_drafted_B) + len(num_drafted_B), dtype=torch.int64)
    if drafted_ids_P is None:
        return drafted_R.to(device)
    rows, row = [], 0
    for count in num_drafted_B:
        rows += range(row, row + count)
        row += count + 1
    drafted_R = drafted_R.to(device)
    drafted_R[torch.tensor(rows, device=device, dtype=torch.int64)] = drafted_ids_P.long()
    return drafted_R


class _Assembly:
    """One request's rounds so far."""

    def __init__(self, prompt_token_ids: list[int], sampling: dict[str, Any], version: str) -> None:
        self._prompt, self._sampling, self._version = list(prompt_token_ids), sampling, version
        self.num_outputs = self._num_rounds = 0
        self._tokens: list[int] = []
        self._rounds: list[int] = []
        self._versions: list[str] = []
        self._top: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._drafted: list[tuple[torch.Tensor, ...]] = []

    def add(
        self,
        tokens: list[int],
        found: _Reduced,
        first_row: int,
        version: str,
        *,
        drafted_ids: torch.Tensor | None,
        drafted_log_probs: torch.Tensor | None,
    ) -> None:
        n, first = len(tokens), self.num_outputs
        if n == 0:
            return
        rows = slice(first_row, first_row + n)
        self._top.append(
            (found.token_ids_RK[rows].clone(), found.log_probs_RK[rows].clone(), found.tail_mass_R[rows].clone())
        )
        count = 0 if drafted_ids is None else len(drafted_ids)
        if drafted_ids is not None and count:
            index, num_accepted = torch.arange(count), n - 1
            zeros = torch.zeros(count)
            self._drafted.append(
                (
                    (first + index).int(),
                    drafted_ids.int(),
                    zeros if drafted_log_probs is None else drafted_log_probs.float(),
                    found.drafted_log_prob_R[first_row : first_row + count].float().clone(),
                    index < num_accepted,
                    index > num_accepted,
                )
            )
        self._tokens += tokens
        self._rounds += [self._num_rounds] * n
        self._versions += [version if count else "none"] * n
        self.num_outputs += n
        self._num_rounds += 1

    def finish(self, request_id: str) -> TappedRequest:
        token_ids, log_probs, tail = (torch.cat(parts) for parts in zip(*self._top, strict=True))
        if self._drafted:
            drafted = [torch.cat(parts) for parts in zip(*self._drafted, strict=True)]
        else:
            kinds = (torch.int32, torch.int32, torch.float32, torch.float32, torch.bool, torch.bool)
            drafted = [torch.empty(0, dtype=kind) for kind in kinds]
        return TappedRequest(
            id=request_id,
            sampling=self._sampling,
            draft_version=self._version,
            prompt_token_ids=torch.tensor(self._prompt, dtype=torch.int32),
            output_token_ids_T=torch.tensor(self._tokens, dtype=torch.int32),
            teacher_token_ids_TK=token_ids,
            teacher_log_probs_TK=log_probs,
            tail_mass_T=tail,
            round_number_T=torch.tensor(self._rounds, dtype=torch.int32),
            version_T=self._versions,
            drafted_position_P=drafted[0],
            drafted_token_id_P=drafted[1],
            drafted_log_prob_P=drafted[2],
            drafted_target_log_prob_P=drafted[3],
            drafted_accepted_P=drafted[4],
            drafted_off_path_P=drafted[5],
        )


_SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


def _sampling_fields(parameters: Any) -> dict[str, Any]:
    """As vLLM uses them, its own defaults included."""
    fields = {name: getattr(parameters, name, None) for name in _SAMPLING_FIELDS}
    stops = parameters.stop_token_ids if parameters.ignore_eos else parameters.all_stop_token_ids
    return {**fields, "stop_token_ids": sorted(stops or ())}
