"""AdaSPEC's choice on an example worked by hand, the age of the online reference, and what it is for: a language whose second
half no small draft can learn."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from livedraft.config import LearningConfig
from livedraft.learning.batches import Example, collate
from livedraft.learning.losses import compare, forward_kl
from livedraft.learning.selection import CONTROL_SHARE, MIN_ALPHA, REFERENCE_AGE, Reference, Selection, keep_largest
from livedraft.learning.trainer import BadStepError
from livedraft.records import SamplingParams
from tests.learning.toy import one_layer_draft, trainer


def test_the_largest_gains_are_kept():
    # Ten positions, by hand: KL of the draft, KL of the reference, and the difference.
    draft = torch.tensor([2.0, 0.5, 3.0, 1.0, 0.2, 4.0, 0.1, 0.9, 1.5, 2.5])
    reference = torch.tensor([0.5, 0.4, 2.9, 0.1, 0.1, 3.9, 0.1, 0.1, 0.2, 2.4])
    gains = draft - reference  # 1.5 .1 .1 .9 .1 .1 0 .8 1.3 .1
    assert keep_largest(gains, 0.4).nonzero()[:, 0].tolist() == [0, 3, 7, 8]
    assert keep_largest(gains, 1.0).all()
    assert keep_largest(gains, 0.01).nonzero()[:, 0].tolist() == [0]


def test_rows_that_cannot_teach_are_neither_kept_nor_counted():
    gains = torch.tensor([5.0, -torch.inf, 1.0, -torch.inf, 3.0])
    assert keep_largest(gains, 0.4).tolist() == [True, False, False, False, True]
    assert not keep_largest(torch.full((3,), -torch.inf), 0.4).any()


def example(trace_id, num_positions=6, seed=0):
    generator = np.random.default_rng(seed)
    teacher = np.stack([generator.permutation(64)[:8] for _ in range(num_positions)]).astype(np.int32)
    log_probs = np.log(generator.dirichlet(np.ones(8), size=num_positions)).astype(np.float16)
    return Example(
        trace_id=trace_id, token_ids=generator.integers(0, 64, 3 + num_positions - 1), num_prompt_tokens=3,
        output_token_ids=teacher[:, 0].astype(np.int64), teacher_token_ids_TK=teacher, teacher_log_probs_TK=log_probs,
        loss_mask_T=np.ones(num_positions, dtype=bool), sampling=SamplingParams(),
    )  # fmt: skip


def test_a_step_takes_the_mean_over_the_positions_its_reference_selects():
    """Against the rule written out: gains of both models, the largest 40 %, the gradient of their mean loss."""
    reference = one_layer_draft()
    for tensor in reference.tensors.values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    one = example(3)
    made = trainer(loss="forward_kl")
    report = made.step([one], selection=Selection(reference=reference, fraction=0.4))
    assert report.num_selected == 3  # ceil of 40 % of six

    twin = trainer(loss="forward_kl")
    batch = collate([one], twin.target_to_draft_V)

    def kl(weights):
        hidden_ND = weights.hidden(batch.token_ids_BT)[batch.loss_rows_N]
        return forward_kl(compare(weights.head(hidden_ND).float(), batch.teacher_rows_NK, batch.teacher_log_probs_NK))

    with twin._autocast():
        own = twin._forward(dataclasses.replace(reference, tensors=twin.parameters))
        gains = kl(own) - kl(twin._forward(reference))
        kept = gains.topk(3).indices
        loss = kl(own)[kept].mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters.values(), 1.0)
    twin.optimizer.step()
    assert report.loss == pytest.approx(loss.item(), rel=0.02)
    for name, parameter in twin.parameters.items():
        torch.testing.assert_close(made.parameters[name], parameter, atol=2e-3, rtol=0)


def test_positions_bad_enough_to_be_selected_are_no_explosion(monkeypatch):
    """An untrained draft is far worse on them than a uniform guess; all positions together say whether a model has blown up."""
    from livedraft.learning import trainer as room

    reference = one_layer_draft()
    for tensor in reference.tensors.values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    selection = Selection(reference=reference, fraction=0.2)
    of_all, of_some = (trainer(loss="forward_kl").step([example(3)], selection=some).loss for some in (None, selection))
    assert of_some > 1.1 * of_all
    uniform = math.log(len(trainer(loss="forward_kl").draft_to_target_W) + 1)
    monkeypatch.setattr(room, "EXPLODED_LOSS", (of_all + of_some) / 2 / uniform)
    trainer(loss="forward_kl").step([example(3)], selection=selection)
    monkeypatch.setattr(room, "EXPLODED_LOSS", 0.5 * of_all / uniform)
    with pytest.raises(BadStepError, match="uniform guess"):
        trainer(loss="forward_kl").step([example(3)], selection=selection)


def test_the_control_group_keeps_all_its_positions():
    made = trainer(loss="forward_kl")
    selection = Selection(reference=one_layer_draft(), fraction=0.2, control_share=CONTROL_SHARE)
    assert made.step([example(20)], selection=selection).num_selected == 6
    assert made.step([example(21)], selection=selection).num_selected == 2


def test_the_reference_is_an_older_self_taken_once_the_draft_has_learnt_something():
    made = trainer()
    on = Reference(LearningConfig(select_fraction=0.4))
    assert on.at(100, MIN_ALPHA - 0.01, made) is None
    assert on.at(120, MIN_ALPHA, made) is None  # the snapshot is taken now
    taken = made.snapshot()
    with torch.no_grad():
        made.averaged["head"] += 1.0
    assert on.at(120 + REFERENCE_AGE - 1, 0.5, made) is None
    found = on.at(120 + REFERENCE_AGE, 0.5, made)
    assert (found.fraction, found.keep, found.control_share) == (0.4, "top", CONTROL_SHARE)
    assert torch.equal(found.reference.tensors["head"], taken.tensors["head"])
    assert torch.equal(on.at(130 + REFERENCE_AGE, 0.1, made).reference.tensors["head"], taken.tensors["head"])
    later = on.at(120 + 2 * REFERENCE_AGE, 0.5, made)
    assert torch.equal(later.reference.tensors["head"], made.averaged["head"])
    off = Reference(LearningConfig())
    assert off.at(10_000, 1.0, made) is None


def test_top_beats_bottom_where_half_of_the_tokens_cannot_be_learnt():
    """Even positions follow a rule of the token before; odd ones are noise that changes with every copy. What is selected
    decides whether the steps go to what can be learnt."""
    generator = np.random.default_rng(0)
    rule = [3, 5, 1, 7, 2, 0, 4, 6]

    def sentence(number):
        tokens = [int(generator.integers(0, 8))]
        for position in range(24):
            is_rule = position % 2 == 0
            tokens.append(rule[tokens[-1]] if is_rule else int(generator.integers(0, 8)))
        teacher = np.array([[t, 8 + t] for t in tokens[1:]], dtype=np.int32)
        return Example(
            trace_id=10 * number + 1, token_ids=np.array(tokens[:-1]), num_prompt_tokens=1,
            output_token_ids=np.array(tokens[1:]), teacher_token_ids_TK=teacher,
            teacher_log_probs_TK=np.log(np.tile([0.98, 0.02], (24, 1))).astype(np.float16),
            loss_mask_T=np.ones(24, dtype=bool), sampling=SamplingParams(),
        )  # fmt: skip

    train, test = [sentence(n) for n in range(240)], [sentence(1000 + n) for n in range(20)]

    def distilled(reference, num_epochs, keep="top"):
        selection = None if reference is None else Selection(reference=reference, fraction=0.4, keep=keep)
        made = trainer(loss="forward_kl", learning_rate=1e-2, averaging=0.0, decay_from_step=0)
        for start in [*range(0, 240, 8)] * num_epochs:
            made.step(train[start : start + 8], selection=selection)
        return made

    reference = distilled(None, 2).snapshot()
    top, bottom = (
        np.mean([score.alpha_t0 for score in distilled(reference, 1, keep).score(test)]) for keep in ("top", "bottom")
    )
    assert top > bottom + 0.05, (top, bottom)


def test_settings_out_of_range_are_refused():
    for fraction in (0.0, 1.1):
        with pytest.raises(ValueError, match="select_fraction"):
            dataclasses.replace(LearningConfig(), select_fraction=fraction)
