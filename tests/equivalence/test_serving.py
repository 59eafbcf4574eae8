"""Over the real HTTP application: every option gives the same with speculation as without, whatever proposes, however many
tokens, in whatever batch, streamed or whole. Reference: the same server, plainly (k = 0), alone, not streamed.

`make test` takes a fixed sample of each option's grid, `make test-long` all of it.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import torch

from livedraft.config import EngineConfig, SpeculationConfig
from livedraft.drafts.weights import DraftWeights
from livedraft.llm import LLM
from livedraft.models.load import load_model
from livedraft.server.local import serve_llm
from livedraft.settings import Settings
from tests.equivalence.covering import covering_array, pairs_of
from tests.hf_folder import TEXT_CONFIG, write_text_model
from tests.serving import InProcess
from tests.tiny import draft_model, perturbed_draft

MAX_TOKENS = 20
PROMPTS = ["hello", "Ünïcode 日本", "a", "The quick brown fox", "🌈🏳️", "1 2 3 4 5 6 7 8 9 10 11", "xyz" * 9, "\n\n"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
SEEDED = {"temperature": 0.9, "seed": 11}
OPTIONS = {
    "greedy": {},
    "seed": SEEDED,
    "temperature": {"temperature": 1.7, "seed": 3},
    "top_p": {**SEEDED, "top_p": 0.7},
    "top_k": {**SEEDED, "top_k": 7},
    "min_p": {**SEEDED, "min_p": 0.1},
    "stop": {"stop": "STOP"},  # filled in from what the model says
    "stop list": {**SEEDED, "stop": ["STOP", "never there"]},
    "stop_token_ids": {"stop_token_ids": ["STOP TOKEN", 257]},
    "max_tokens": {"max_tokens": 3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {**SEEDED, "frequency_penalty": 1.2},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {**SEEDED, "logit_bias": {"70": 4, "71": -100, "257": 2}},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "logprobs seeded": {**SEEDED, "logprobs": True},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"257": 6}},
    "eos": {**SEEDED, "logit_bias": {"257": 3}},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "n": {**SEEDED, "n": 2},
}
PROPOSERS = ["draft", "poor draft", "trimmed draft", "prediction", "suffix", "suffix and poor draft"]
GRID = list(itertools.product(range(6), (1, 3, 8), (False, True)))
SAMPLE_SIZE = 5


class Bench:
    """One engine, several drafts, and the plain answers, each computed once."""

    def __init__(self, folder) -> None:
        self.llm = LLM(
            str(folder),
            dtype="float32",
            num_threads=1,
            engine=EngineConfig(max_num_seqs=8, max_model_len=256),
            speculation=SpeculationConfig(num_speculative_tokens=5),
        )
        model = load_model(folder, torch.float32)
        good = perturbed_draft(model, noise=0.04, num_tokens=TEXT_CONFIG.vocabulary_size)
        rows = torch.arange(0, TEXT_CONFIG.vocabulary_size, 2)
        weights = {
            "draft": good,
            "poor draft": perturbed_draft(model, noise=0.3, num_tokens=TEXT_CONFIG.vocabulary_size),
            "trimmed draft": DraftWeights(
                tensors={**good.tensors, "head": good.tensors["head"][rows]},
                draft_to_target_W=good.draft_to_target_W[rows],
            ),
        }
        target = self.llm.engine.runner.target
        self.drafts = {name: draft_model(one, target, version=name) for name, one in weights.items()}
        self.client = InProcess(serve_llm(self.llm, Settings())).__enter__()
        self.name = self.client.server.served.name
        self._plain = {}
        self.stop = "\x08"  # what this model says most

    def body(self, options, prompt, **more):
        options = {name: self._filled(value) for name, value in options.items()}
        messages = [{"role": "user", "content": prompt}]
        return {"model": self.name, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, **options, **more}

    def _filled(self, value):
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        if value == "STOP TOKEN":
            return self.llm.tokenizer.encode_text(self.stop)[0]
        return self.stop if value == "STOP" else value

    def plain(self, options, prompt):
        key = (repr(options), prompt)
        if key not in self._plain:
            self._plain[key] = self.client.complete(self.body(options, prompt, num_speculative_tokens=0))
        return self._plain[key]

    def propose_from(self, proposer):
        """From the next round on; None is nothing."""
        has_suffixes = proposer is not None and proposer.startswith("suffix")
        self.llm.engine.drafting.uses_suffixes = has_suffixes
        self.llm.engine.offer_draft(self.drafts.get((proposer or "").removeprefix("suffix and ")))

    def check(self, options, proposer, k, batch, is_stream):
        prompts = PROMPTS[:batch]
        wanted = [self.plain(options, prompt) for prompt in prompts]
        assert all(reply.status == 200 for reply in wanted), wanted[0].body
        more = {"num_speculative_tokens": k}
        if is_stream:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [self.body(options, prompt, **more) for prompt in prompts]
        if proposer == "prediction":
            for body, reply in zip(bodies, wanted):
                text = reply.choices[0].text
                body["prediction"] = {"type": "content", "content": text[:6] + "!" + text[7:]}
        self.propose_from(proposer)
        replies = self.client.complete(*bodies)
        for prompt, reply, plain in zip(prompts, replies if batch > 1 else [replies], wanted):
            where = (options, proposer, k, batch, is_stream, prompt)
            assert reply.status == 200, (reply.body, where)
            assert reply.counts == plain.counts, where
            assert len(reply.choices) == len(plain.choices)
            for got, expected in zip(reply.choices, plain.choices):
                assert (got.text, got.finish_reason, got.stop_reason) == (
                    expected.text,
                    expected.finish_reason,
                    expected.stop_reason,
                ), where
                assert_same_logprobs(got.logprobs, expected.logprobs, where)


def assert_same_logprobs(got, expected, where):
    assert [token for token, _, _ in got] == [token for token, _, _ in expected], where
    for (_, value, top), (_, plain_value, plain_top) in zip(got, expected):
        assert value == pytest.approx(plain_value, abs=1e-4), where
        assert [t for t, _ in top] == [t for t, _ in plain_top], where
        assert [v for _, v in top] == pytest.approx([v for _, v in plain_top], abs=1e-4), where


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(write_text_model(tmp_path_factory.mktemp("served")))
    yield made
    made.client.__exit__()


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_alone_gives_the_same_as_plain_decoding(bench, option, proposer):
    cells = random.Random(f"{option} {proposer}").sample(GRID, SAMPLE_SIZE)
    for k, batch, is_stream in cells:
        bench.check(OPTIONS[option], proposer, k, batch, is_stream)


@pytest.mark.long
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_full_grid_of_an_option(bench, option, proposer):
    for k, batch, is_stream in GRID:
        bench.check(OPTIONS[option], proposer, k, batch, is_stream)


FACTORS = {
    "mode": [{}, SEEDED, {"temperature": 1.4, "seed": 2**40}],
    "top_p": [{}, {"top_p": 0.8}],
    "top_k": [{}, {"top_k": 20}],
    "min_p": [{}, {"min_p": 0.05}],
    "stop": [{}, {"stop": ["STOP"]}, {"stop_token_ids": ["STOP TOKEN"]}],
    "presence": [{}, {"presence_penalty": 0.8}],
    "frequency": [{}, {"frequency_penalty": -0.5}],
    "repetition": [{}, {"repetition_penalty": 1.3}],
    "bias": [{}, {"logit_bias": {"257": 2, "80": 3}}],
    "logprobs": [{}, {"logprobs": True, "top_logprobs": 3}],
    "max_tokens": [{}, {"max_tokens": 7}],
    "format": [{}, {"response_format": {"type": "json_object"}}],
    "n": [{}, {"n": 3}],
    "proposer": PROPOSERS,
    "k": [1, 2, 5],
    "batch": [1, 3, 8],
    "stream": [False, True],
}
ROWS = covering_array(FACTORS, seed=0)


def test_the_covering_array_covers_every_pair():
    seen = set()
    for row in ROWS:
        seen |= pairs_of({name: FACTORS[name].index(value) for name, value in row.items()})
    sizes = [len(levels) for levels in FACTORS.values()]
    assert len(seen) == sum(a * b for a, b in itertools.combinations(sizes, 2))


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_pairs_of_options_give_the_same_as_plain_decoding(bench, row):
    options = {}
    for name, level in row.items():
        if name not in ("proposer", "k", "batch", "stream"):
            options |= level
    bench.check(options, row["proposer"], row["k"], row["batch"], row["stream"])


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("option", ["seed", "frequency_penalty", "logit_bias", "greedy"])
def test_a_request_is_the_same_alone_and_among_eight_of_every_kind(bench, option, k):
    """The others are unseeded, of other lengths and drafts' lengths, and the version changes while they run."""
    chance = random.Random(f"{option} {k}")
    others = [
        bench.body(OPTIONS[name], PROMPTS[-1 - n], num_speculative_tokens=n % 6, max_tokens=5 + 7 * n, temperature=1.1)
        for n, name in enumerate(chance.sample([o for o in OPTIONS if o not in ("response_format", "n")], 8))
    ]
    one = bench.body(OPTIONS[option], PROMPTS[0], num_speculative_tokens=k, max_tokens=40)
    alone = bench.client.complete(one | {"num_speculative_tokens": 0})
    for proposer in PROPOSERS:

        async def together(proposer=proposer):
            running = asyncio.gather(*(bench.client.reply(body) for body in [*others[:4], one, *others[4:]]))
            for version in (proposer, None, "draft"):
                await asyncio.sleep(0.02)
                bench.propose_from(version)
            return await running

        replies = bench.client.run(together())
        assert [reply.status for reply in replies] == [200] * 9
        assert replies[4].choices == alone.choices


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_proposers_above_are_neither_always_right_nor_always_wrong(bench, proposer):
    """Guards the tests above: equality would be cheap without proposals, and without rejections."""
    # Greedy texts were all said before, so suffixes of them would always be right.
    options = {"temperature": 1.0, "seed": 77} if proposer.startswith("suffix") else {}
    bench.check(options, proposer, 5, 8, False)
    stats = bench.llm.engine.stats_by_version["default", proposer.split(" and ")[0]]
    assert 0.02 < stats.acceptance_rate < 0.98


def test_reference_answers_end_in_every_way(bench):
    """Guards the tests above: a stop that never comes would prove nothing about stops."""
    ends = {
        option: {
            (c.finish_reason, type(c.stop_reason)) for p in PROMPTS for c in bench.plain(OPTIONS[option], p).choices
        }
        for option in OPTIONS
    }
    assert ("stop", str) in ends["stop"]
    assert ("stop", int) in ends["stop_token_ids"]
    assert ("stop", type(None)) in ends["eos"]
    assert ends["ignore_eos"] == {("length", type(None))}
    texts = {option: [bench.plain(OPTIONS[option], prompt).choices[0].text for prompt in PROMPTS] for option in OPTIONS}
    for option in ("presence_penalty", "repetition_penalty", "logprobs", "stop_token_ids", "response_format"):
        assert (texts[option] != texts["greedy"]) == (option != "logprobs")
    for option in ("top_p", "top_k", "min_p", "frequency_penalty", "logit_bias"):
        assert texts[option] != texts["seed"]
