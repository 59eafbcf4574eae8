"""What the target says about an answer it did not give: one pass over the whole text instead of one a token.

For traces made from somebody else's records. The positions are judged as if the answer had been generated, so they teach the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from livedraft.engine.request import RequestState
from livedraft.engine.tracing import TraceBuilder, TracedRound, record_rounds
from livedraft.models.step import ModelStep
from livedraft.records import Request, Trace

_ROWS_PER_PASS = 256


@torch.inference_mode()
def judged_trace(
    target: ModelStep, request: Request, output_token_ids: Sequence[int], target_fingerprint: str
) -> Trace:
    """The trace of this request as if it had been answered so. Uses slot 0 of an idle target.

    Raises ValueError for what does not fit the target's cache or vocabulary.
    """
    state = RequestState.from_request(request)
    state.token_ids += output_token_ids
    if not output_token_ids or len(state.token_ids) > target.max_length:
        raise ValueError(f"{len(state.token_ids)} tokens do not fit the limit of {target.max_length}.")
    if min(state.token_ids) < 0 or max(state.token_ids) >= target.vocabulary_size:
        raise ValueError(f"Token ids must lie in 0..{target.vocabulary_size - 1}.")
    builder = TraceBuilder()
    first_output = len(request.prompt_token_ids)
    written = state.token_ids[:-1]  # the last token predicts nothing
    position = 0
    for start in range(0, len(written), _ROWS_PER_PASS):
        tokens = written[start : start + _ROWS_PER_PASS]
        rows = [row for row in range(len(tokens)) if start + row >= first_output - 1]
        output = target.forward(tokens, list(range(start, start + len(tokens))), [0] * len(tokens), rows)
        if rows:
            one = TracedRound(
                trace=builder,
                target_logits_RV=output.logits_RV,
                proposal=None,
                num_accepted=0,
                num_committed=len(rows),
                is_cut=False,
                first_position=position,
                round_number=position,
            )
            record_rounds([one])
            position += len(rows)
    return builder.finish(state, target_fingerprint)
