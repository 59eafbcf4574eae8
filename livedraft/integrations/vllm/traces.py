"""Tapped requests to traces: what a worker saw, joined with what the parent knows of the request."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from livedraft.integrations.vllm.wire import REQUEST_ID_PREFIX, TappedRequest
from livedraft.records import DRAFT_TOP_K, SamplingParams, Trace

MAX_KNOWN_REQUESTS = 10_000
KNOWN_SECONDS = 3600.0
"""A request's trace comes soon after its end; after this long nobody waits for it."""
_ID = re.compile(re.escape(REQUEST_ID_PREFIX) + "[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the parent knows of a request that may be learnt from."""

    route: str
    conversation_key: str
    client_key: str
    arrived_at: float


class KnownRequests:
    """By the id that the parent gave them. Used by the event loop and by the threads that unpack."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Known] = OrderedDict()

    def add(self, request_id: str, known: Known) -> None:
        with self._lock:
            self._known[request_id] = known
            oldest = time.time() - KNOWN_SECONDS
            while self._known and (
                len(self._known) > MAX_KNOWN_REQUESTS or next(iter(self._known.values())).arrived_at < oldest
            ):
                self._known.popitem(last=False)

    def of(self, engines_id: str) -> Known | None:
        """vLLM puts its own words before and after the id it is given, and another number for each of several choices."""
        found = _ID.search(engines_id)
        if found is None:
            return None
        with self._lock:
            return self._known.get(found.group())


def to_traces(requests: Iterable[TappedRequest], known: KnownRequests, target_fingerprint: str) -> list[Trace]:
    """Of those that are known and said something; others are none of ours, or may not be kept."""
    traces = []
    for request in requests:
        details = known.of(request.id)
        num_outputs = num_served(request)
        if details is not None and num_outputs:
            traces.append(to_trace(request, details, num_outputs, target_fingerprint))
    return traces


def num_served(request: TappedRequest) -> int:
    """Output tokens up to the one that ended it: a round may verify more. (What a stop string cut off stays: the target said
    it.)"""
    token_ids = request.output_token_ids_T.tolist()
    stops = set(request.sampling["stop_token_ids"])
    end = next((index + 1 for index, token in enumerate(token_ids) if token in stops), len(token_ids))
    most = request.sampling.get("max_tokens")
    return min(end, int(most)) if most is not None else end


def to_trace(request: TappedRequest, known: Known, num_outputs: int, target_fingerprint: str) -> Trace:
    """All parallel arrays are trimmed alike."""
    output = slice(0, num_outputs)
    is_kept_P = request.drafted_position_P.numpy() < num_outputs
    drafted = {
        name: getattr(request, name).numpy()[is_kept_P]
        for name in (one.name for one in fields(TappedRequest))
        if name.startswith("drafted_")
    }
    num_drafted = int(is_kept_P.sum())
    return Trace(
        request_id=request.id,
        route=known.route,
        target_fingerprint=target_fingerprint,
        sampling=sampling_of(request.sampling),
        draft_version=request.draft_version,
        arrived_at=known.arrived_at,
        conversation_key=known.conversation_key,
        client_key=known.client_key,
        prompt_token_ids=request.prompt_token_ids.tolist(),
        output_token_ids=request.output_token_ids_T[output].tolist(),
        teacher_token_ids_TK=request.teacher_token_ids_TK[output].numpy(),
        teacher_log_probs_TK=request.teacher_log_probs_TK[output].numpy(),
        tail_mass_T=request.tail_mass_T[output].numpy(),
        round_number_T=request.round_number_T[output].numpy(),
        position_version_T=request.version_T[output],
        # vLLM's proposer keeps the probability of what it drew, not its other candidates.
        draft_top_token_ids_PQ=np.full((num_drafted, DRAFT_TOP_K), -1, dtype=np.int32),
        draft_top_log_probs_PQ=np.full((num_drafted, DRAFT_TOP_K), -np.inf, dtype=np.float16),
        **drafted,
    )


def sampling_of(fields_: dict[str, Any]) -> SamplingParams:
    """vLLM's parameters as ours, as far as both know them; its seeds may be negative, and its top_k says "off" in two ways."""
    given = {name: value for name, value in fields_.items() if value is not None}
    given["top_k"] = max(0, int(given.get("top_k", 0)))
    given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    if int(given.get("seed", 0)) < 0:
        del given["seed"]
    return SamplingParams(**given)
