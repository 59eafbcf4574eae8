"""Each loss against an independent float64 reference, value and gradient, on full and trimmed vocabularies."""

import pytest
import torch

from livedraft.learning.losses import (
    HYBRID_DECAY,
    LOSS_FUNCTIONS,
    MIN_SHARED_MASS,
    compare,
    cross_entropy,
    forward_kl,
    hybrid,
    jsd,
    loss_function,
    neg_log_alpha,
    reverse_kl,
    tvd,
)

N, V = 5, 12
LABELS = [0, 3, 7, 9, 11]  # the draft of the trimmed case has 8 rows: two of these it does not know


def full_case(seed=0):
    """Teacher keeps everything, draft has everything: the textbook setting."""
    generator = torch.Generator().manual_seed(seed)
    target_logits = 2 * torch.randn(N, V, generator=generator, dtype=torch.double)
    draft_logits = 2 * torch.randn(N, V, generator=generator, dtype=torch.double)
    rows = torch.arange(V).expand(N, V)
    return draft_logits, rows, target_logits.log_softmax(-1)


def trimmed_case(seed=0, top_k=6):
    """Teacher keeps its top 6 of 12; the draft lacks every third token."""
    draft_logits, _, log_probs = full_case(seed)
    ids = torch.tensor([token for token in range(V) if token % 3])
    lookup = torch.full((V,), -1)
    lookup[ids] = torch.arange(len(ids))
    top = log_probs.topk(top_k, dim=-1)
    return draft_logits[:, : len(ids)].contiguous(), lookup[top.indices], top.values


def reference(name, draft_logits, rows, log_probs, beta=0.5):
    """Loops over positions and tokens, straight from the definitions."""
    draft_probs = draft_logits.softmax(-1)
    per_position = {"forward_kl": [], "reverse_kl": [], "jsd": [], "tvd": [], "neg_log_alpha": [], "cross_entropy": []}
    for position in range(len(rows)):
        shared = [(k, row) for k, row in enumerate(rows[position].tolist()) if row >= 0]
        target = torch.stack([log_probs[position, k].exp() for k, _ in shared])
        draft = torch.stack([draft_probs[position, row] for _, row in shared])
        mass = target.sum()
        renormalised = target / mass
        per_position["forward_kl"].append(mass * (renormalised * (renormalised / draft).log()).sum())
        overlap = torch.minimum(target, draft).sum()
        per_position["tvd"].append(1 - overlap)
        per_position["neg_log_alpha"].append(-overlap.log())
        rest = torch.tensor([1e-12], dtype=torch.double)
        p = torch.cat([target, (1 - mass)[None].maximum(rest)])
        q = torch.cat([draft, (1 - draft.sum())[None].maximum(rest)])
        per_position["reverse_kl"].append((q * (q / p).log()).sum())
        mixture = beta * p + (1 - beta) * q
        sides = [(one * (one / mixture).log()).sum() for one in (p, q)]
        per_position["jsd"].append(beta * sides[0] + (1 - beta) * sides[1])
        label = LABELS[position] if LABELS[position] < draft_probs.shape[1] else None
        per_position["cross_entropy"].append(torch.zeros(()) if label is None else -draft_probs[position, label].log())
    stacked = {key: torch.stack(values) for key, values in per_position.items()}
    if name == "hybrid":
        weight = torch.exp(-HYBRID_DECAY * (1 - stacked["tvd"]).mean().detach())
        return weight * stacked["forward_kl"] + (1 - weight) * stacked["tvd"]
    return stacked[name]


@pytest.mark.parametrize("case", [full_case, trimmed_case])
@pytest.mark.parametrize("name", LOSS_FUNCTIONS)
def test_value_and_gradient_equal_the_reference(name, case):
    function = LOSS_FUNCTIONS[name]
    for seed in range(3):
        draft_logits, rows, log_probs = case(seed)
        ours, theirs = draft_logits.clone().requires_grad_(), draft_logits.clone().requires_grad_()
        labels = torch.tensor([label if label < draft_logits.shape[1] else -1 for label in LABELS])
        values = function(compare(ours, rows, log_probs, labels))
        expected = reference(name, theirs, rows, log_probs)
        assert torch.allclose(values, expected, atol=1e-10)
        weights = torch.arange(1.0, N + 1, dtype=torch.double)
        (values * weights).sum().backward()
        (expected * weights).sum().backward()
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-10)


@pytest.mark.parametrize("case", [full_case, trimmed_case])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_the_mixtures_share_is_a_setting(beta, case):
    draft_logits, rows, log_probs = case(1)
    ours, theirs = draft_logits.clone().requires_grad_(), draft_logits.clone().requires_grad_()
    values = loss_function("jsd", jsd_beta=beta)(compare(ours, rows, log_probs))
    expected = reference("jsd", theirs, rows, log_probs, beta)
    assert torch.allclose(values, expected, atol=1e-10)
    values.sum().backward()
    expected.sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-10)
    assert loss_function("tvd", jsd_beta=beta) is tvd


def test_full_vocabulary_forms_are_the_textbooks():
    draft_logits, rows, log_probs = full_case()
    comparison = compare(draft_logits, rows, log_probs)
    probs, draft_log_probs = log_probs.exp(), draft_logits.log_softmax(-1)
    assert torch.allclose(forward_kl(comparison), (probs * (log_probs - draft_log_probs)).sum(-1))
    assert torch.allclose(tvd(comparison), 0.5 * (probs - draft_log_probs.exp()).abs().sum(-1))
    assert torch.allclose(neg_log_alpha(comparison), -(1 - tvd(comparison)).log())
    assert torch.allclose(reverse_kl(comparison), (draft_log_probs.exp() * (draft_log_probs - log_probs)).sum(-1))
    mixture = 0.3 * probs + 0.7 * draft_log_probs.exp()
    to_target = (probs * (log_probs - mixture.log())).sum(-1)
    to_draft = (draft_log_probs.exp() * (draft_log_probs - mixture.log())).sum(-1)
    assert torch.allclose(jsd(comparison, beta=0.3), 0.3 * to_target + 0.7 * to_draft)
    labelled = compare(draft_logits, rows, log_probs, torch.tensor(LABELS))
    expected = torch.nn.functional.cross_entropy(draft_logits, torch.tensor(LABELS), reduction="none")
    assert torch.allclose(cross_entropy(labelled), expected)


def test_equal_distributions_cost_nothing():
    draft_logits, rows, _ = full_case()
    comparison = compare(draft_logits, rows, draft_logits.log_softmax(-1))
    for function in (forward_kl, reverse_kl, jsd, tvd, neg_log_alpha, hybrid):
        assert function(comparison).abs().max() < 1e-9


def test_draft_mass_outside_the_teachers_tokens_costs():
    """The tail class: moving the draft's mass to tokens the teacher did not keep makes forward_kl larger."""
    draft_logits, rows, log_probs = trimmed_case()
    outside = torch.ones_like(draft_logits, dtype=torch.bool)
    for position in range(N):
        outside[position, rows[position][rows[position] >= 0]] = False
    more = forward_kl(compare(draft_logits + 3.0 * outside, rows, log_probs))
    assert (more > forward_kl(compare(draft_logits, rows, log_probs))).all()


def test_a_position_the_vocabulary_hardly_covers_teaches_nothing_and_stays_finite():
    log_probs = torch.tensor([[0.99, 0.01]]).log()
    comparison = compare(torch.zeros(1, 4), torch.tensor([[-1, 2]]), log_probs)
    assert comparison.shared_mass_N.item() == pytest.approx(0.01)
    assert comparison.shared_mass_N.item() < MIN_SHARED_MASS
    assert not comparison.teaches_N.item()
    nothing = compare(torch.zeros(1, 4), torch.tensor([[-1, -1]]), log_probs, torch.tensor([-1]))
    assert all(torch.isfinite(f(nothing)).all() for f in LOSS_FUNCTIONS.values())
