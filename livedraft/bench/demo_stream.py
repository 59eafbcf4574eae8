"""The demo's traffic: questions to a small plant shop, written for this project and filled from templates.

One narrow domain, as a real small service has; no prompt occurs twice. For the benches,
`python -m livedraft.bench.demo_stream 0 1500 > stream.jsonl` writes the first 1,500 to learn from, `1500 1564` others to ask.
"""

from __future__ import annotations

import argparse
import json
import random

_PLANTS = """
lavender, rosemary, basil, mint, thyme, sage, parsley, monstera, pothos, snake plant, peace lily, orchid, jade plant,
aloe vera, spider plant, rubber plant, fiddle leaf fig, Boston fern, English ivy, African violet, begonia, geranium,
hydrangea, rose bush, tulip, daffodil, tomato plant, chili pepper, cucumber, strawberry, blueberry bush, lemon tree,
olive tree, bonsai, cactus, string of pearls, calathea, philodendron, ZZ plant, dracaena, gardenia, jasmine, fuchsia,
azalea, camellia, bird of paradise, croton, dieffenbachia, echeveria, hoya, kalanchoe, maidenhair fern, oxalis,
passion flower, petunia, pilea, poinsettia, prayer plant, staghorn fern, umbrella tree
"""
_PROBLEMS = """
yellow leaves, brown leaf tips, drooping stems, white powder on the leaves, small flies around the soil, slow growth,
black spots on the leaves, sticky leaves, soil that shrinks from the pot, soft roots, pale new leaves, dropped buds,
curled leaves, tiny webs under the leaves, a sour smell from the soil, leaves that fall at night, long thin stems,
holes in the leaves, a white crust on the soil, wrinkled leaves
"""
_PLACES = """
next to a north-facing window, on a sunny balcony, in a dark hallway, in a bathroom with a small window, on an office desk,
in a greenhouse, on a kitchen windowsill, in a bedroom corner, above a radiator, near a drafty door, under a skylight,
on a shaded terrace
"""
_GIVERS = "mother, brother, neighbour, friend, grandmother, colleague, daughter, teacher"
_SITUATIONS = (
    "My {plant} stands {place} and has {problem}. I water it every {days} days.",
    "The {plant} that my {giver} gave me has {problem}. It stands {place} and gets water every {days} days.",
)
_WISHES = {  # how many in four ask so
    "Name the likely cause and give three steps that help.": 3,
    "Explain in plain words what is going on with this plant.": 1,
}
_MOST = 50_000
"""Prompts by the command: well below what the templates give."""


def plant_shop_prompts(count: int, seed: int) -> list[str]:
    """`count` different questions, the same for the same seed."""
    plants, problems, places, givers = (
        [name.strip() for name in names.split(",")] for names in (_PLANTS, _PROBLEMS, _PLACES, _GIVERS)
    )
    generator = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        situation = generator.choice(_SITUATIONS).format(
            plant=generator.choice(plants),
            place=generator.choice(places),
            problem=generator.choice(problems),
            days=generator.randint(2, 14),
            giver=generator.choice(givers),
        )
        wish = generator.choices(list(_WISHES), weights=list(_WISHES.values()))[0]
        prompt = f"A customer of our plant shop writes: {situation} {wish}"
        prompts[prompt] = None
    return list(prompts)


def repeated_share(held_out: list[list[int]], training: list[list[int]], length: int = 8) -> float:
    """Share of the held-out answers' n-grams that also occur in training answers: how much could be learnt by heart."""

    def grams(token_ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)]

    known = {gram for answer in training for gram in grams(answer)}
    asked = [gram for answer in held_out for gram in grams(answer)]
    return sum(gram in known for gram in asked) / len(asked) if asked else 0.0


def _print_prompts() -> None:
    parser = argparse.ArgumentParser(prog="python -m livedraft.bench.demo_stream", description=__doc__)
    parser.add_argument("start", type=int, help="how many to leave out")
    parser.add_argument("stop", type=int, help="the last one's number")
    parser.add_argument("--seed", type=int, default=1, help="the demo's own stream is 0")
    asked = parser.parse_args()
    if not 0 <= asked.start < asked.stop <= _MOST:
        parser.error(f"start and stop must be 0 <= start < stop <= {_MOST}.")
    for prompt in plant_shop_prompts(asked.stop, asked.seed)[asked.start :]:
        print(json.dumps({"messages": [{"role": "user", "content": prompt}]}))


if __name__ == "__main__":
    _print_prompts()
