"""The draft's lagging cache, in all its causes: its proposals are those of a cache written afresh."""

import pytest
import torch

from livedraft.records import SamplingParams
from livedraft.speculation import draft_model as room
from livedraft.speculation.proposer import ProposalTask
from tests.tiny import decoder, draft_model, perturbed_draft, random_model

MODEL = random_model()
WEIGHTS = perturbed_draft(MODEL, noise=0.3)
TARGET = decoder(MODEL)


def task(token_ids, k, slot=0, **sampling):
    return ProposalTask(
        slot=slot, token_ids=token_ids, num_prompt_tokens=2, sampling=SamplingParams(**sampling), seed=5, num_tokens=k
    )


def fresh_proposal(token_ids, k, **sampling):
    return draft_model(WEIGHTS, TARGET).propose([task(token_ids, k, **sampling)])[0]


COMMITTED = [3, 9, 27, 17, 51, 25, 11, 33]


def test_proposal_is_greedy_continuation_of_the_draft():
    token_ids = list(COMMITTED)
    proposal = fresh_proposal(token_ids, 4)
    for token in proposal.draft_token_ids:
        assert fresh_proposal(token_ids, 1).draft_token_ids == [token]
        token_ids = [*token_ids, token]


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_after_any_verdict(num_accepted):
    """3 accepted leaves a gap of two: the last drafted token was never fed."""
    draft = draft_model(WEIGHTS, TARGET)
    proposal = draft.propose([task(COMMITTED, 3)])[0]
    committed = COMMITTED + proposal.draft_token_ids[:num_accepted] + [60]
    draft.commit(0, len(committed) - 1)
    assert draft.propose([task(committed, 3)])[0].draft_token_ids == fresh_proposal(committed, 3).draft_token_ids


def test_after_rounds_without_drafting():
    draft = draft_model(WEIGHTS, TARGET)
    draft.propose([task(COMMITTED[:3], 2)])
    for end in range(4, len(COMMITTED) + 1):
        draft.commit(0, end - 1)
        assert draft.propose([task(COMMITTED[:end], 0)])[0].draft_token_ids == []
    assert draft.propose([task(COMMITTED, 2)])[0].draft_token_ids == fresh_proposal(COMMITTED, 2).draft_token_ids


def test_a_released_slot_starts_afresh():
    draft = draft_model(WEIGHTS, TARGET)
    draft.propose([task([60, 61, 62, 63] * 3, 3)])
    draft.release(0)
    assert draft.propose([task(COMMITTED, 2)])[0].draft_token_ids == fresh_proposal(COMMITTED, 2).draft_token_ids


def test_long_gap_is_closed_over_several_rounds_with_empty_proposals(monkeypatch):
    monkeypatch.setattr(room, "MAX_CATCH_UP", 3)
    draft = draft_model(WEIGHTS, TARGET)
    lengths = []
    for _ in range(3):
        proposal = draft.propose([task(COMMITTED, 2)])[0]
        lengths.append(len(proposal.draft_token_ids))
        draft.commit(0, len(COMMITTED) - 1)
    assert lengths == [0, 0, 2]
    monkeypatch.undo()
    assert proposal.draft_token_ids == fresh_proposal(COMMITTED, 2).draft_token_ids


def test_mixed_batch_equals_each_alone():
    draft = draft_model(WEIGHTS, TARGET)
    tasks = [
        task(COMMITTED, 3, slot=0),
        task(COMMITTED[:4], 1, slot=1, temperature=0.8, seed=5),
        task(COMMITTED[:2], 0, slot=2),
        task(COMMITTED[:6], 2, slot=3, temperature=1.0),
    ]
    together = draft.propose(tasks)
    for one, proposal in zip(tasks, together):
        alone = draft_model(WEIGHTS, TARGET).propose([one])[0]
        assert proposal.draft_token_ids == alone.draft_token_ids
        assert len(proposal.draft_token_ids) == one.num_tokens
        assert (proposal.draft_probs_KW is None) == (
            one.sampling.is_greedy or one.sampling.seed is not None or one.num_tokens == 0
        )
    assert torch.allclose(together[3].draft_probs_KW.sum(-1), torch.ones(2))


def test_trimmed_vocabulary_maps_rows_to_target_ids():
    weights = perturbed_draft(MODEL, noise=0.0, num_tokens=10)
    rows = torch.tensor([1, 5, 8])
    weights.tensors["head"] = weights.tensors["head"][rows]
    weights.draft_to_target_W = weights.draft_to_target_W[rows]
    proposal = draft_model(weights, TARGET).propose([task(COMMITTED, 4)])[0]
    assert set(proposal.draft_token_ids) <= {1, 5, 8}
    assert [[1, 5, 8][row] for row in proposal.draft_row_ids] == proposal.draft_token_ids


def test_drafting_stops_after_keeping_a_token_that_makes_acceptance_unlikely():
    """The stopped proposal is the beginning of the unstopped one, one token past where the chance fell below."""
    import dataclasses

    whole = draft_model(WEIGHTS, TARGET).propose([dataclasses.replace(task(COMMITTED, 6), stop_below=(1e-9,) * 6)])[0]
    assert len(whole.confidences) == 6
    reach = [1.0]
    for confidence in whole.confidences:
        reach.append(reach[-1] * confidence)
    for length in range(1, 6):
        threshold = (reach[length] + reach[length - 1]) / 2
        stopped = draft_model(WEIGHTS, TARGET).propose(
            [dataclasses.replace(task(COMMITTED, 6), stop_below=(threshold,) * 6)]
        )[0]
        assert stopped.draft_token_ids == whole.draft_token_ids[:length]
