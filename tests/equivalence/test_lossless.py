"""The layer that matters most: whatever proposes, in whatever batch, across swaps, the output is plain decoding's."""

import pytest
import torch

from livedraft.config import EngineConfig
from livedraft.drafts.weights import DraftWeights
from livedraft.records import SamplingParams
from livedraft.sampling import logits_to_probs
from tests.tiny import (
    PROMPTS,
    VOCABULARY_SIZE,
    decoder,
    draft_model,
    engine,
    perturbed_draft,
    random_model,
    request,
    serve,
)

MODEL = random_model()
NOISES = {"perfect": 0.0, "good": 0.04, "poor": 0.3}
SAMPLING = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 17},
    "seeded top_p": {"temperature": 1.2, "seed": 3, "top_p": 0.8, "top_k": 20},
}


def plain(prompts, **sampling):
    return serve(engine(decoder(MODEL), None), [request(p, i, **sampling) for i, p in enumerate(prompts)])


def with_draft(weights, **options):
    target = decoder(MODEL)
    return engine(target, draft_model(weights, target), **options)


def trimmed(weights: DraftWeights, step: int) -> DraftWeights:
    rows = torch.arange(0, VOCABULARY_SIZE, step)
    return DraftWeights(
        tensors={**weights.tensors, "head": weights.tensors["head"][rows]},
        draft_to_target_W=weights.draft_to_target_W[rows],
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 3, 5, None])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("mode", SAMPLING)
def test_equals_plain_decoding_token_for_token(mode, noise, k, batch):
    prompts = PROMPTS[:batch]
    served = with_draft(perturbed_draft(MODEL, noise=NOISES[noise]), k=k)
    outputs = serve(served, [request(p, i, **SAMPLING[mode]) for i, p in enumerate(prompts)])
    assert outputs == plain(prompts, **SAMPLING[mode])
    assert served.stats.num_draft_tokens > 0
    if noise == "perfect" and mode == "greedy":
        assert served.stats.acceptance_rate > 0.95


def test_the_drafts_above_are_neither_always_right_nor_always_wrong():
    """Guards the test above: equality would be cheap if every proposal were rejected."""
    rates = {}
    for name, noise in NOISES.items():
        served = with_draft(perturbed_draft(MODEL, noise=noise))
        serve(served, [request(p, i) for i, p in enumerate(PROMPTS)])
        rates[name] = served.stats.acceptance_rate
    assert rates["perfect"] > rates["good"] > rates["poor"]
    assert 0.2 < rates["good"] < 0.95


@pytest.mark.parametrize("mode", SAMPLING)
def test_trimmed_vocabulary_changes_nothing(mode):
    served = with_draft(trimmed(perturbed_draft(MODEL, noise=0.1), step=2))
    outputs = serve(served, [request(p, i, **SAMPLING[mode]) for i, p in enumerate(PROMPTS)])
    assert outputs == plain(PROMPTS, **SAMPLING[mode])
    assert 0 < served.stats.num_accepted_tokens < served.stats.num_draft_tokens


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_swap_in_the_middle_of_a_generation_changes_nothing(mode, batch):
    """good -> poor -> none -> perfect, every three rounds, with requests running all the while."""
    target = decoder(MODEL)
    drafts = [draft_model(perturbed_draft(MODEL, noise=n), target, version=str(n)) for n in (0.1, 0.6, 0.0)]
    served = engine(target, drafts[0])
    states = [served.add_request(request(p, i, **SAMPLING[mode])) for i, p in enumerate(PROMPTS[:batch])]
    offers = [drafts[1], None, drafts[2]]
    versions, rounds = [], 0
    while served.has_work:
        rounds += 1
        if rounds % 3 == 0 and offers:
            served.offer_draft(offers.pop(0))
        served.step()
        versions.append(served.draft_version)
    assert [state.output_token_ids for state in states] == plain(PROMPTS[:batch], **SAMPLING[mode])
    assert {"0.1", "0.6", "none"} <= set(versions)


def test_requests_that_join_and_leave_change_nothing():
    """Seven requests over two slots, chunked prefill of three tokens a round."""
    prompts = [PROMPTS[i % 4] + [i] for i in range(7)]
    lengths = [3, 20, 1, 9, 14, 2, 6]
    target = decoder(MODEL, num_slots=2)
    config = EngineConfig(max_num_seqs=2, max_model_len=target.max_length, prefill_token_budget=3)
    served = engine(target, draft_model(perturbed_draft(MODEL, noise=0.1), target), config=config)
    outputs = serve(served, [request(p, i, max_tokens=n) for i, (p, n) in enumerate(zip(prompts, lengths))])
    alone = [plain([p], max_tokens=n)[0] for p, n in zip(prompts, lengths)]
    assert outputs == alone


@pytest.mark.parametrize("draft", [None, 0.04, 0.3])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 5, None])
@pytest.mark.parametrize("mode", SAMPLING)
def test_suffixes_of_own_and_others_texts_change_nothing(mode, k, batch, draft):
    """Alone and beside a draft, on texts that were said before and, with another seed, nearly so."""
    prompts = [[*p, *p, 3] for p in PROMPTS[:batch]]
    served = with_suffixes(draft, k=k)
    for attempt in range(3):
        sampling = {"max_tokens": 40, **SAMPLING[mode]}
        if attempt and "seed" in sampling:
            sampling["seed"] += attempt // 2
        outputs = serve(served, [request(p, 10 * attempt + i, **sampling) for i, p in enumerate(prompts)])
        assert outputs == plain(prompts, **sampling)
    assert served.stats_by_version["default", "suffix"].num_accepted_tokens > 0


def with_suffixes(noise=None, **options):
    target = decoder(MODEL)
    draft = None if noise is None else draft_model(perturbed_draft(MODEL, noise=noise), target)
    return engine(target, draft, suffixes=True, **options)


def test_a_swap_beside_suffixes_changes_nothing():
    served = with_suffixes(0.3, k=None)
    serve(served, [request([*p, *p], 100 + i, max_tokens=60) for i, p in enumerate(PROMPTS)])
    requests = [request([*p, *p], i, max_tokens=60) for i, p in enumerate(PROMPTS)]
    states = [served.add_request(one) for one in requests]
    rounds = 0
    while served.has_work:
        served.step()
        rounds += 1
        if rounds % 5 == 0:
            draft = draft_model(
                perturbed_draft(MODEL, noise=0.04 * (rounds % 3)), served.runner.target, version=f"v{rounds}"
            )
            served.offer_draft(draft if rounds % 2 else None)
    assert [s.output_token_ids for s in states] == plain([[*p, *p] for p in PROMPTS], max_tokens=60)
    assert served.stats_by_version["default", "suffix"].num_accepted_tokens > 0


def test_mixed_greedy_seeded_and_unseeded_batch():
    target = decoder(MODEL)
    served = engine(target, draft_model(perturbed_draft(MODEL, noise=0.1), target))
    modes = [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.0}, {"temperature": 0.5, "seed": 6}]
    outputs = serve(served, [request(p, i, **m) for i, (p, m) in enumerate(zip(PROMPTS, modes))])
    for index in (0, 1, 3):
        assert outputs[index] == plain([PROMPTS[index]], **modes[index])[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"presence_penalty": 1.5, "repetition_penalty": 1.2, "logit_bias": ((9, 2.0),)},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=["plain", "penalties and bias", "filters"],
)
@pytest.mark.parametrize("weights", ["full", "trimmed", "suffix"])
def test_unseeded_sampling_equals_the_target_in_distribution(weights, options):
    """The first two of three tokens of 6,000 unseeded requests, against the exact joint law computed from the target's
    logits. k = 2, so the second is accepted, recovered after an acceptance, or a bonus."""
    num_requests, temperature = 6000, 0.7
    draft = perturbed_draft(MODEL, noise=0.2)
    draft = trimmed(draft, step=3) if weights == "trimmed" else draft
    target = decoder(MODEL, num_slots=32)
    served = engine(target, draft_model(draft, target), k=2)
    prompt = [5, 9]
    if weights == "suffix":  # the traffic's texts begin as this prompt and go on as they were drawn
        served = engine(target, None, k=2, suffixes=True)
        prompt = [7, 5, 9]
    sampling = {"temperature": temperature, "max_tokens": 3, **options}
    outputs = serve(served, [request(prompt, i, **sampling) for i in range(num_requests)])
    assert len(served.stats.num_accepted_tokens_per_pos) == 2
    assert 0.1 < served.stats.acceptance_rate < 0.98
    reference = decoder(MODEL)

    def law(logits_V, output):
        """By the definition of the penalties, one token at a time, independent of `PrefixState`."""
        logits_V = logits_V.double()
        if "top_k" in options:  # the filters have their own tests
            return logits_to_probs(logits_V[None], SamplingParams(temperature=temperature, **options))[0].double()
        for token in range(VOCABULARY_SIZE):
            if "presence_penalty" in options and token in [*prompt, *output]:
                factor = options["repetition_penalty"]
                logits_V[token] = logits_V[token] / factor if logits_V[token] > 0 else logits_V[token] * factor
            if "presence_penalty" in options and token in output:
                logits_V[token] -= options["presence_penalty"]
        for token, addend in options.get("logit_bias", ()):
            logits_V[token] += addend
        return (logits_V / temperature).softmax(-1)

    last = len(prompt) - 1
    first = law(reference.forward(prompt, list(range(last + 1)), [0] * (last + 1), [last]).logits_RV[0], [])
    joint = {}
    for token in range(VOCABULARY_SIZE):
        second = law(reference.forward([token], [last + 1], [0], [0]).logits_RV[0], [token])
        joint.update({(token, other): (first[token] * second[other]).item() for other in range(VOCABULARY_SIZE)})
    counts: dict[tuple[int, int], int] = {}
    for output in outputs:
        counts[tuple(output[:2])] = counts.get(tuple(output[:2]), 0) + 1
    common = {pair: p for pair, p in joint.items() if p * num_requests > 8}
    rest = 1 - sum(common.values())
    statistic = sum((counts.get(pair, 0) - p * num_requests) ** 2 / (p * num_requests) for pair, p in common.items())
    num_rest = num_requests - sum(counts.get(pair, 0) for pair in common)
    statistic += (num_rest - rest * num_requests) ** 2 / (rest * num_requests)
    degrees = len(common)
    assert degrees > 10
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, (statistic, degrees)
