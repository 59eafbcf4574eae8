"""Two drafts side by side: who gets which, that nothing but speed depends on it, and that each is counted by itself."""

import dataclasses
import zlib

import pytest
import torch

from livedraft.engine.drafting import EVIDENCE_ROUNDS, Lineup
from tests.tiny import COSTS, PROMPTS, decoder, draft_model, engine, perturbed_draft, random_model, request, serve

MODEL = random_model()
PLAIN = serve(engine(decoder(MODEL), None), [request(p, i) for i, p in enumerate(PROMPTS)])


def two_drafts(share, *, k=3, noise=(0.0, 0.05), **options):
    target = decoder(MODEL)
    first, second = (
        draft_model(perturbed_draft(MODEL, noise=n), target, version=v) for n, v in zip(noise, ("one", "two"))
    )
    served = engine(target, first, k=k, **options)
    served.drafting.offer(Lineup(service=first, second=second, share=share))
    return served, first, second


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_answers_are_plain_decodings_whoever_drafts(share):
    served, _, _ = two_drafts(share)
    assert serve(served, [request(p, i) for i, p in enumerate(PROMPTS)]) == PLAIN
    rounds = {version: stats.num_drafts for (_, version), stats in served.stats_by_version.items()}
    assert rounds["two"] > 0  # the first request at least, for evidence
    assert ("one" in rounds) == (share < 1)


def test_a_seeded_request_is_the_same_whoever_drafts():
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 30}
    alone = serve(engine(decoder(MODEL), None), [request(PROMPTS[0], **options)])
    for share in (0.0, 1.0):
        served, _, _ = two_drafts(share)
        assert serve(served, [request(PROMPTS[0], **options)]) == alone


def test_requests_are_shared_out_by_their_ids_and_the_first_one_decides_for_evidence():
    served, first, _ = two_drafts(0.3)
    served.take_up_offered_draft()  # nobody is running
    states = [served.add_request(request([1], number)) for number in range(200)]
    by_hash = [zlib.crc32(s.request.id.encode()) / 2**32 < 0.3 for s in states]
    assert [s.is_on_second for s in states[1:]] == by_hash[1:]
    assert states[0].is_on_second
    assert 0.2 < sum(by_hash) / 200 < 0.4
    assert {s.draft_version_at_arrival for s in states if s.is_on_second} == {"two"}
    served.offer_draft(first)
    served.take_up_offered_draft()
    assert {served.drafting.version_for(s) for s in states} == {"one"}


def test_running_requests_move_over_and_at_least_one_gives_evidence_at_once():
    served, first, second = two_drafts(0.0)
    served.drafting.withdraw_offer()
    states = [served.add_request(request(p, i)) for i, p in enumerate(PROMPTS)]
    served.step()
    served.drafting.offer(Lineup(service=first, second=second, share=1e-9))
    while served.has_work:
        served.step()
    assert [s.output_token_ids for s in states] == PLAIN
    assert sum(s.is_on_second for s in states) == 1
    two = served.stats_by_version["default", "two"]
    assert two.num_requests == 1
    assert two.num_drafts > 2
    assert served.stats_by_version["default", "one"].num_requests == 4


def test_a_draft_that_does_not_pay_still_gives_evidence_while_it_is_compared():
    served, _, second = two_drafts(1.0, k=None)
    served.drafting.offer(Lineup(service=served.draft, prior=0.0, second=second, second_prior=0.0, share=1.0))
    serve(served, [request(PROMPTS[0], max_tokens=40)])
    assert served.stats_by_version["default", "two"].num_drafts >= EVIDENCE_ROUNDS
    alone, _, _ = two_drafts(0.0, k=None)
    alone.offer_draft(alone.draft)
    alone.take_up_offered_draft()
    alone.drafting.service.lengths.set_prior(0.0)
    serve(alone, [request(PROMPTS[0], max_tokens=40)])
    assert not alone.stats_by_version  # alone it is only probed, one round in 64


def test_a_swap_is_said_only_when_another_draft_serves():
    served, first, second = two_drafts(0.5)
    seen = []
    served.events.subscribe(seen.append)
    served.take_up_offered_draft()
    assert not seen
    served.drafting.offer(Lineup(service=second, second=first, share=0.1))
    served.take_up_offered_draft()
    served.offer_draft(second)
    served.take_up_offered_draft()
    assert [(e["event"], e["previous"], e["version"]) for e in seen] == [("draft_swapped", "one", "two")]


DEAR_WRITING = dataclasses.replace(COSTS, draft_write_seconds=0.2)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "is_drafted"), [(5, 8, True), (90, 8, False), (90, 30, True), (20, 2, False)]
)
def test_a_long_prompt_is_read_for_an_answer_worth_it(num_prompt, max_tokens, is_drafted):
    """Reading 90 tokens costs 18 of the target's passes; drafting saves about two thirds of the answer's."""
    target = decoder(MODEL)
    draft = draft_model(perturbed_draft(MODEL, noise=0.04), target)
    served = engine(target, draft, k=None, prior=0.7, costs=DEAR_WRITING)
    prompt = [(5 * n) % 60 for n in range(num_prompt)]
    serve(served, [request(prompt, max_tokens=max_tokens)])
    assert (served.stats.num_draft_tokens > 0) == is_drafted


def test_probes_of_a_draft_that_does_not_pay_read_no_long_prompts_all_the_time():
    def rows_read(write_seconds):
        target = decoder(MODEL)
        draft = draft_model(perturbed_draft(MODEL, noise=2.0), target)
        costs = dataclasses.replace(COSTS, draft_write_seconds=write_seconds)
        served = engine(target, draft, k=None, prior=0.0, costs=costs)
        for number in range(30):
            serve(served, [request([(number + 5 * n) % 60 for n in range(90)], number, max_tokens=30)])
        return draft.num_rows

    free, dear = rows_read(0.0), rows_read(0.05)
    assert free > 90 * 8  # a probe in 64 rounds, each of another prompt
    assert 0 < dear < free / 2  # but probes there are


def test_the_users_fixed_length_is_kept_also_in_a_comparison():
    served, _, _ = two_drafts(0.5, k=0)
    serve(served, [request(p, i) for i, p in enumerate(PROMPTS)])
    assert not served.stats_by_version


def test_a_second_draft_that_fails_leaves_the_first_at_work(monkeypatch):
    served, first, second = two_drafts(1.0)
    monkeypatch.setattr(second, "propose", lambda tasks: 1 / 0)
    assert serve(served, [request(p, i) for i, p in enumerate(PROMPTS)]) == PLAIN
    assert list(served.drafting.failures) == ["two"]
    assert served.draft is first
    assert served.stats_by_version["default", "one"].num_drafts > 0


def test_what_was_learnt_about_a_draft_stays_when_the_lineup_changes():
    served, first, second = two_drafts(0.5, k=None)
    serve(served, [request(p, i) for i, p in enumerate(PROMPTS)])
    lengths = served.drafting.second.lengths
    served.drafting.offer(Lineup(service=second, prior=0.1, second=first, share=0.1))
    served.take_up_offered_draft()
    assert served.drafting.service.lengths is lengths


def test_a_draft_of_numbers_that_are_none_costs_speed_and_nothing_else():
    for mode in ({}, {"temperature": 1.0, "seed": 4}):
        served, _, second = two_drafts(1.0)
        for tensor in (second.decoder.weights.final_norm_D,):
            tensor.fill_(torch.nan)
        plain = serve(engine(decoder(MODEL), None), [request(PROMPTS[1], **mode)])
        assert serve(served, [request(PROMPTS[1], **mode)]) == plain
    served, _, second = two_drafts(1.0)
    second.decoder.weights.final_norm_D.fill_(torch.nan)
    (output,) = serve(served, [request(PROMPTS[1], temperature=1.0)])
    assert len(output) == 24


def test_a_long_prompt_is_not_read_for_a_draft_that_suffixes_leave_little_to():
    def rows_read(suffix_value):
        target = decoder(MODEL)
        draft = draft_model(perturbed_draft(MODEL, noise=0.04), target)
        served = engine(target, draft, k=None, prior=0.7, costs=DEAR_WRITING, suffixes=True)
        for _ in range(400):
            served.drafting.routes["default"].beside_suffixes.record(1.5, suffix_value)
        serve(served, [request([(5 * n) % 60 for n in range(59)], max_tokens=30)])
        return draft.num_rows

    assert rows_read(0.0) >= 59
    assert rows_read(2.0) < 59


def rows_read_for_long_prompts(noise, write_seconds):
    """Of 90 tokens, of which a route with short prompts promises much; request by request."""
    target = decoder(MODEL)
    draft = draft_model(perturbed_draft(MODEL, noise=noise), target)
    served = engine(
        target, draft, k=None, prior=0.7, costs=dataclasses.replace(COSTS, draft_write_seconds=write_seconds)
    )
    rows = []
    for number in range(40):
        for resident in served.drafting.residents():
            resident.lengths.set_prior(0.7)  # whatever these requests come to, others do well
        before = draft.num_rows
        serve(served, [request([(number + 5 * n) % 60 for n in range(90)], number, max_tokens=30)])
        rows.append(draft.num_rows - before)
    return rows


def test_promises_that_long_prompts_do_not_keep_are_not_believed_for_long():
    poor = rows_read_for_long_prompts(noise=2.0, write_seconds=0.1)
    assert poor[0] >= 90  # the route's word, until something else is known
    assert sum(rows >= 90 for rows in poor[10:]) <= 10
    assert any(rows >= 90 for rows in poor[10:])  # and now and then it is tried again
    assert all(rows >= 90 for rows in rows_read_for_long_prompts(noise=0.0, write_seconds=0.1))
