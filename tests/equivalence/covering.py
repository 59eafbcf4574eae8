"""A covering array: few rows in which every pair of levels of two factors occurs."""

from __future__ import annotations

import itertools
import random
from typing import Any


def covering_array(factors: dict[str, list[Any]], seed: int, num_candidates: int = 60) -> list[dict[str, Any]]:
    """Greedy: of some random rows the one with most new pairs, until every pair is there."""
    chance = random.Random(seed)
    names = list(factors)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while missing:
        candidates = []
        for _ in range(num_candidates):
            a, i, b, j = chance.choice(sorted(missing))  # every candidate covers one missing pair at least
            row = {name: chance.randrange(len(levels)) for name, levels in factors.items()} | {a: i, b: j}
            candidates.append((len(pairs_of(row) & missing), row))
        _, best = max(candidates, key=lambda candidate: candidate[0])
        missing -= pairs_of(best)
        rows.append({name: factors[name][level] for name, level in best.items()})
    return rows


def pairs_of(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}
