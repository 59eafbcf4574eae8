"""The gate: is a candidate better than the version in service, on requests it has not trained on?

Paired over requests, because requests differ more than versions do. The bootstrap is studentised: with eight requests a
plain percentile bootstrap promotes lucky candidates about twice as often as it says. A sign-flip test of the same differences
must agree: it is exact for symmetric differences at any number of requests, where the bootstrap is still a little generous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MIN_REQUESTS, MIN_POSITIONS = 8, 500
FALSE_PROMOTION_RATE = 0.10
"""Over all tests since the last promotion: the n-th is held at level 0.10 / (n (n + 1)), which sums to 0.10."""
LARGEST_FALL = 0.02
"""Of alpha on any one stream that a draft serves."""
FALL_ERRORS = 1.65
"""Standard errors that a stream's fall has to lie above zero: of many streams with a few requests each, some always fall."""
NUM_RESAMPLES = 20_000


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """`promote` is None while there is not enough evidence."""

    promote: bool | None
    reason: str
    num_requests: int
    num_positions: int
    candidate_alpha: float
    parent_alpha: float
    p_value: float | None = None
    level: float | None = None
    test_number: int | None = None

    def as_fields(self) -> dict[str, Any]:
        return asdict(self)


def decide(
    candidate_alpha_R: list[float],
    parent_alpha_R: list[float],
    *,
    num_positions: int,
    test_number: int,
    seed: int = 0,
) -> GateDecision:
    """Compare per-request alphas of the same R requests. `test_number` counts tests since the last promotion, from 1."""
    assert len(candidate_alpha_R) == len(parent_alpha_R)
    assert test_number >= 1
    R = len(candidate_alpha_R)
    candidate, parent = np.asarray(candidate_alpha_R), np.asarray(parent_alpha_R)
    numbers: dict[str, Any] = {
        "num_requests": R,
        "num_positions": num_positions,
        "candidate_alpha": float(candidate.mean()) if R else 0.0,
        "parent_alpha": float(parent.mean()) if R else 0.0,
    }
    if R < MIN_REQUESTS or num_positions < MIN_POSITIONS:
        return GateDecision(
            promote=None,
            reason=f"not enough evidence: {R} of {MIN_REQUESTS} requests, {num_positions} of {MIN_POSITIONS} positions",
            **numbers,
        )
    level = FALSE_PROMOTION_RATE / (test_number * (test_number + 1))
    p_value = one_sided_p_value(candidate - parent, seed=seed)
    better = p_value <= level
    return GateDecision(
        promote=better,
        reason=f"alpha {numbers['candidate_alpha']:.3f} against {numbers['parent_alpha']:.3f}, "
        f"p = {p_value:.4f} {'<=' if better else '>'} {level:.4f}",
        p_value=p_value,
        level=level,
        test_number=test_number,
        **numbers,
    )


def harmed_stream(
    streams_R: Sequence[str], candidate_alpha_R: Sequence[float], parent_alpha_R: Sequence[float]
) -> str | None:
    """A stream of traffic on which the candidate is worse by more than LARGEST_FALL and beyond chance, named in a sentence: the
    others' gain must not be its loss. Streams with fewer than MIN_REQUESTS are not judged."""
    for stream in dict.fromkeys(streams_R):
        falls = [
            parent - candidate
            for name, candidate, parent in zip(streams_R, candidate_alpha_R, parent_alpha_R, strict=True)
            if name == stream
        ]
        if len(falls) < MIN_REQUESTS:
            continue
        mean, error = float(np.mean(falls)), float(np.std(falls, ddof=1)) / math.sqrt(len(falls))
        if mean > max(LARGEST_FALL, FALL_ERRORS * error):
            return f"alpha falls by {mean:.3f} on route {stream}, more than {LARGEST_FALL:g}"
    return None


def one_sided_p_value(differences_R: np.ndarray, *, seed: int) -> float:
    """The larger of two p-values for a mean above zero: studentised bootstrap, and sign flips."""
    R = len(differences_R)
    mean, deviation = differences_R.mean(), differences_R.std(ddof=1)
    if deviation < 1e-12:
        return 0.0 if mean > 0 else 1.0
    generator = np.random.default_rng(seed)
    # How often does a resample's t lie above the observed one, when the true mean is moved to zero?
    observed_t = mean / (deviation / np.sqrt(R))
    resampled = differences_R[generator.integers(0, R, size=(NUM_RESAMPLES, R))]
    # A resample of one repeated request has no spread; its t would be infinite either way.
    deviations = np.maximum(resampled.std(axis=1, ddof=1), 1e-3 * deviation)
    t = (resampled.mean(axis=1) - mean) / (deviations / np.sqrt(R))
    # How often does the mean reach the observed one, when each request's sign is a coin?
    signs = np.where(generator.random((NUM_RESAMPLES, R), dtype=np.float32) < 0.5, -1.0, 1.0)
    flipped_means = signs @ differences_R / R
    num_extreme = max(np.count_nonzero(t >= observed_t), np.count_nonzero(flipped_means >= mean - 1e-12))
    return float((1 + num_extreme) / (1 + NUM_RESAMPLES))
