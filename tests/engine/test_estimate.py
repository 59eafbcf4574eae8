"""What rounds would have cost plainly: counted by hand."""

import pytest

from livedraft.engine.estimate import PlainEstimate
from livedraft.engine.request import RequestState
from livedraft.engine.scheduler import RoundEntry
from livedraft.records import Proposal
from livedraft.speculation.draft_length import CostModel
from tests.tiny import PROMPTS, decoder, draft_model, engine, perturbed_draft, random_model, request, serve

COSTS = CostModel(target_seconds_by_rows={1: 1.0, 2: 1.2, 100: 20.8}, draft_seconds_by_requests={1: 0.1, 2: 0.15})
MODEL = random_model()


def entries(*rows):
    """1 is a decoding request; more are so many rows of a prompt still being written."""
    return [
        RoundEntry(state=RequestState.from_request(request([1])), num_pending_rows=n, is_decoding=n == 1) for n in rows
    ]


def drafted(count, version="v1"):
    return Proposal(draft_token_ids=[1] * count, draft_version=version)


@pytest.mark.parametrize(
    ("rows", "proposals", "num_emitted", "seconds", "plain"),
    [
        ([1], [None], 1, 1.0, 1.0),
        ([1], [drafted(3)], 4, 1.6 + 0.3, 4.0),
        ([1], [drafted(3)], 1, 1.6 + 0.3, 1.0),  # all rejected
        ([1], [drafted(3, "suffix")], 4, 1.6, 4.0),  # found, not drafted
        ([1, 1], [drafted(3), drafted(1)], 5, 2.0 + 3 * 0.15, 1.2 + 3 * 0.6),
        ([1, 1], [drafted(2), None], 4, 1.6 + 2 * 0.1, 1.2 + 2 * 0.6),
        ([50], [None], 0, 10.8, 10.8),  # a prompt costs the same either way
        ([1, 9], [drafted(1), None], 2, 3.0 + 0.1, 2.8 + 1.0),
    ],
)
def test_a_round(rows, proposals, num_emitted, seconds, plain):
    estimate = PlainEstimate(COSTS)
    estimate.record(entries(*rows), proposals, num_emitted)
    assert (estimate.seconds, estimate.plain_seconds) == pytest.approx((seconds, plain))


@pytest.mark.parametrize("noise", [None, 0.0])
def test_the_engine_counts_every_round(noise):
    """A perfect draft is worth a multiple, no draft is worth nothing: exactly 1."""
    target = decoder(MODEL)
    draft = None if noise is None else draft_model(perturbed_draft(MODEL, noise=noise), target)
    served = engine(target, draft, k=3)
    serve(served, [request(PROMPTS[0], 0, max_tokens=24)])
    speedup = served.estimate.plain_seconds / served.estimate.seconds
    assert speedup == 1.0 if noise is None else speedup > 2.0
