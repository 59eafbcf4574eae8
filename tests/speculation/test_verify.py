"""The lossless rules, one test each, and the exhaustive check of the emitted distribution."""

from fractions import Fraction
from itertools import product

import pytest
import torch

from livedraft.records import Proposal, SamplingParams
from livedraft.sampling import ACCEPT, RECOVER, draw, logits_to_probs, uniform
from livedraft.speculation import verify as room
from livedraft.speculation.verify import (
    gumbel_choice,
    residual,
    verify,
    verify_by_rejection,
    verify_exact,
    verify_together,
)

SAMPLED = SamplingParams(temperature=1.0)


def proposal(tokens, draft_probs=None, rows=None, ids=None):
    return Proposal(
        draft_token_ids=list(tokens),
        draft_version="v",
        draft_row_ids=list(rows if rows is not None else tokens),
        draft_probs_KW=None if draft_probs is None else torch.tensor(draft_probs),
        draft_to_target_W=None if ids is None else torch.tensor(ids),
    )


# --- the emitted distribution, exactly -------------------------------------------------------------------------------


class Grid:
    """Stands in for `uniform`: a depth-first walk over all outcomes of every number asked for, on a grid of 1/size.

    With probabilities in quarters every threshold and every normalised residual lies on the grid, so counting grid points
    is exact arithmetic, not an approximation. Size 4 does where thresholds and residuals are quarters and halves, 12
    where thirds occur too.
    """

    def __init__(self, size):
        self.path, self.depth, self.size = [], 0, size

    def __call__(self, _seed, _position, _purpose):
        if self.depth == len(self.path):
            self.path.append(0)
        value = (self.path[self.depth] + 0.5) / self.size
        self.depth += 1
        return value

    def outcomes(self, run):
        """(weight, result) of every branch."""
        while True:
            self.depth = 0
            result = run()
            yield Fraction(1, self.size ** len(self.path)), result
            while self.path and self.path[-1] == self.size - 1:
                self.path.pop()
            if not self.path:
                return
            self.path[-1] += 1


def quarters(*numbers):
    assert sum(numbers) == 4
    return [Fraction(number, 4) for number in numbers]


CASES = {  # name: (target's distribution after a prefix, the draft's or None for one without probabilities, grid)
    "different": (lambda prefix: quarters(2, 1, 1) if len(prefix) % 2 else quarters(1, 0, 3), quarters(1, 2, 1), 4),
    "equal": (lambda prefix: quarters(2, 1, 1), quarters(2, 1, 1), 4),
    "disjoint": (lambda prefix: quarters(3, 1, 0), quarters(0, 0, 4), 4),
    "target one-hot": (lambda prefix: quarters(0, 4, 0), quarters(1, 2, 1), 4),
    "draft one-hot": (lambda prefix: quarters(1, 1, 2) if sum(prefix) % 2 else quarters(2, 2, 0), None, 12),
    "trimmed": (lambda prefix: quarters(1, 2, 1), quarters(1, 0, 3), 12),
}


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_emitted_distribution_is_exactly_the_targets(monkeypatch, name, k):
    """Sum over every draft path and every random outcome: the joint law of the emitted tokens, continued by the target
    where a round was cut short, equals the target's law of sequences."""
    target, draft_probs, grid_size = CASES[name]
    is_trimmed = name == "trimmed"
    ids = [0, 2] if is_trimmed else None
    grid = Grid(grid_size)
    monkeypatch.setattr(room, "uniform", grid)
    emitted: dict[tuple[int, ...], Fraction] = {}
    fixed_path = (2, 0, 1)[:k]  # a proposer without probabilities suggests one fixed path
    paths = [fixed_path] if draft_probs is None else product(range(3), repeat=k)
    for path in paths:
        weight = Fraction(1)
        for token in path if draft_probs is not None else ():
            weight *= draft_probs[token]
        if weight == 0:
            continue
        rows = [list(map(float, target(path[:i]))) for i in range(k + 1)]
        stored = None
        if draft_probs is not None:
            kept = [float(draft_probs[token]) for token in (ids or range(3))]
            stored = [kept] * k
        made = proposal(path, stored or None, [ids.index(t) for t in path] if ids else path, ids) if k else None
        for share, verdict in grid.outcomes(lambda m=made, r=rows: verify_by_rejection(torch.tensor(r), m, 0, 0)):
            key = tuple(verdict.output_token_ids)
            emitted[key] = emitted.get(key, Fraction(0)) + weight * share
            grid.depth = 0
        grid.path = []
    assert sum(emitted.values()) == 1
    for sequence in product(range(3), repeat=k + 1):
        wanted = Fraction(1)
        for index, token in enumerate(sequence):
            wanted *= target(sequence[:index])[token]
        found = Fraction(0)
        for output, weight in emitted.items():
            if sequence[: len(output)] == output:
                for index in range(len(output), k + 1):
                    weight *= target(sequence[:index])[sequence[index]]
                found += weight
        assert found == wanted, sequence


# --- the rules -------------------------------------------------------------------------------------------------------


def test_rule_1_temperature_zero_is_one_hot_even_at_near_ties():
    logits = torch.tensor([[1.0, 1.0 + 1e-6, 0.5]])
    greedy = SamplingParams(temperature=0.0)
    assert logits_to_probs(logits, greedy).tolist() == [[0.0, 1.0, 0.0]]
    assert verify(logits.repeat(2, 1), proposal([0]), greedy, 1, 0).output_token_ids == [1]  # the near tie is rejected
    assert logits_to_probs(torch.tensor([[2.0, 2.0]]), greedy).tolist() == [[1.0, 0.0]]  # equal: the lowest id


def test_rule_2_recorded_probabilities_decide(monkeypatch):
    """The same token and target, judged by what the draft recorded: 0.9 is rejected at u = 0.5, 0.4 is kept."""
    monkeypatch.setattr(room, "uniform", lambda *_: 0.5)
    target = torch.tensor([[0.4, 0.6], [0.5, 0.5]])
    assert verify_by_rejection(target, proposal([0], [[0.9, 0.1]]), 0, 0).num_accepted == 0
    assert verify_by_rejection(target, proposal([0], [[0.4, 0.6]]), 0, 0).num_accepted == 1


def test_rule_3_every_drawn_token_is_judged():
    """Equal distributions accept everything, however unlikely each drawn token looks to draft and target."""
    probs = [0.01, 0.99]
    made = proposal([0, 0, 0], [probs] * 3)
    for seed in range(50):
        assert verify_by_rejection(torch.tensor([probs] * 4), made, seed, 0).num_accepted == 3


def test_rule_4_without_probabilities_one_hot_and_trimmed_is_zero_elsewhere():
    target = torch.tensor([0.25, 0.5, 0.25])
    assert residual(target, proposal([1]), 0).tolist() == [0.25, 0.0, 0.25]
    trimmed = proposal([2], [[0.25, 0.75]], rows=[1], ids=[0, 2])
    assert residual(target, trimmed, 0).tolist() == [0.0, 0.5, 0.0]
    accepted = [
        verify_by_rejection(torch.stack([target, target]), proposal([1]), seed, 0).num_accepted for seed in range(4000)
    ]
    assert abs(sum(accepted) / 4000 - 0.5) < 0.03  # accepted with the target's own probability


def test_rule_5_empty_residual_samples_the_target():
    probs = torch.tensor([0.5, 0.5])
    assert residual(probs, proposal([0], [[0.5, 0.5]]), 0).tolist() == [0.5, 0.5]


def test_rule_7_randomness_is_by_counter():
    assert uniform(3, 5, ACCEPT) == uniform(3, 5, ACCEPT)
    numbers = {uniform(s, p, w) for s in range(10) for p in range(10) for w in (ACCEPT, RECOVER)}
    assert len(numbers) == 200
    assert abs(sum(numbers) / 200 - 0.5) < 0.06


def test_rule_7_seeded_output_does_not_depend_on_the_proposal():
    torch.manual_seed(0)
    logits = torch.randn(5, 20)
    sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
    plain = [verify(logits[i : i + 1], None, sampling, 11, i).output_token_ids[0] for i in range(5)]
    perfect = verify(logits, proposal(plain[:4]), sampling, 11, 0)
    assert perfect.num_accepted == 4
    assert perfect.output_token_ids == plain
    wrong = [(token + 1) % 20 for token in plain]
    for cut in range(4):
        verdict = verify(logits, proposal(plain[:cut] + wrong[cut:4]), sampling, 11, 0)
        assert verdict.num_accepted == cut
        assert verdict.output_token_ids == plain[: cut + 1]


def test_rule_7_draft_reads_the_same_noise_through_its_trimmed_vocabulary():
    torch.manual_seed(0)
    logits = torch.randn(6, 40)
    ids = torch.tensor([1, 4, 9, 16, 25, 36])
    masked = torch.full_like(logits, -torch.inf)
    masked[:, ids] = logits[:, ids]
    sampling = SamplingParams(temperature=1.3, seed=2)
    on_target = gumbel_choice(masked, sampling, 2, 7)
    on_draft = gumbel_choice(logits[:, ids], sampling, 2, 7, target_vocabulary_size=40, draft_to_target_W=ids)
    assert ids[on_draft].tolist() == on_target


def test_exact_verdict_keeps_the_bonus_and_the_first_difference():
    assert verify_exact([5, 6, 7], [5, 6]).output_token_ids == [5, 6, 7]
    assert verify_exact([5, 6, 7], [5, 9]).output_token_ids == [5, 6]
    assert verify_exact([5], []).output_token_ids == [5]


# --- the real sampler, statistically ---------------------------------------------------------------------------------


def chi_square_per_degree(counts, probs):
    expected = probs * counts.sum()
    kept = expected > 5
    return (((counts - expected)[kept] ** 2 / expected[kept]).sum() / (kept.sum() - 1)).item()


@pytest.mark.parametrize("is_seeded", [False, True])
def test_first_emitted_token_is_target_distributed(is_seeded):
    """50,000 draws of draft and verdict through the real code; chi-square per degree of freedom near 1."""
    generator = torch.Generator().manual_seed(3)
    target_logits = 1.5 * torch.randn(1, 12, generator=generator)
    draft_logits = target_logits + torch.randn(1, 12, generator=generator)
    target_probs, draft_probs = (logits_to_probs(x, SAMPLED) for x in (target_logits, draft_logits))
    counts, num_accepted = torch.zeros(12, dtype=torch.double), 0
    num_draws = 50_000
    for seed in range(num_draws):
        if is_seeded:
            sampling = SamplingParams(temperature=1.0, seed=seed)
            made = proposal(gumbel_choice(draft_logits, sampling, seed, 0))
            verdict = verify(target_logits.repeat(2, 1), made, sampling, seed, 0)
        else:
            token = draw(draft_probs[0], uniform(seed, 0, 1))
            made = proposal([token], draft_probs.tolist())
            verdict = verify_by_rejection(target_probs.repeat(2, 1), made, seed, 0)
        counts[verdict.output_token_ids[0]] += 1
        num_accepted += verdict.num_accepted
    assert chi_square_per_degree(counts, target_probs[0].double()) < 2.0
    overlap = torch.minimum(target_probs, draft_probs).sum().item()
    rate = num_accepted / num_draws
    if is_seeded:  # shared noise accepts at least (1 - TVD) / (1 + TVD)
        assert overlap / (2 - overlap) - 0.01 <= rate <= overlap + 0.01
    else:  # rejection sampling accepts exactly the overlap
        assert abs(rate - overlap) < 0.01


@pytest.mark.parametrize("kind", ["full", "trimmed", "one-hot"])
def test_read_together_the_verdicts_are_those_read_one_by_one(kind):
    """Hundreds of cases of every length, none drafted and residuals without mass among them."""
    torch.manual_seed(0)
    cases, V = [], 24
    ids = torch.arange(0, V, 3) if kind == "trimmed" else torch.arange(V)
    for seed in range(300):
        k = seed % 5
        logits = 3 * torch.randn(k + 1, V)
        draft_probs = (logits[:k][:, ids] + (0.0 if seed % 7 == 0 else 1.0) * torch.randn(k, len(ids))).softmax(-1)
        rows = [draw(probs, uniform(seed, row, 1)) for row, probs in enumerate(draft_probs)]
        one = proposal(ids[rows].tolist(), rows=rows)
        if kind != "one-hot":
            one.draft_probs_KW, one.draft_to_target_W = draft_probs, ids if kind == "trimmed" else None
        sampling = SamplingParams(temperature=0.7 + seed % 3, top_k=seed % 2 * 6)
        cases.append((logits, one if k or seed % 2 else None, sampling, seed, seed % 11))
    expected = [verify(*case) for case in cases]
    assert verify_together(cases) == expected
    assert len({verdict.num_accepted for verdict in expected}) >= 4
    assert verify_together([]) == []
