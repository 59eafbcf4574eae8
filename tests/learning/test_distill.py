"""Offline distillation: a run that is killed goes on as if it had not been; several processes train as one; and what AdaSPEC's
selection keeps."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from livedraft.config import DistillConfig, DistillRunConfig
from livedraft.learning.batches import collate, example_from_trace
from livedraft.learning.distill import (
    CHECKPOINT_NAME,
    DRAFT_NAME,
    Distillation,
    Interval,
    is_validation,
    rate_of,
    read_metrics,
    selection_of,
    split,
    trainer_at_rate,
)
from livedraft.learning.selection import Selection
from livedraft.learning.teacher import FullTeacher, Writer
from livedraft.records import SamplingParams, UserError
from tests.learning.toy import MODEL, one_layer_draft, served_traces, trainer
from tests.tiny import decoder, request, serve
from tests.tiny import engine as tiny_engine

CONFIG = DistillConfig(epochs=2, batch_size=4, checkpoint_steps=3, validate_steps=4, warmup_steps=0, save_steps=5)


@pytest.fixture(scope="module")
def examples():
    return [example_from_trace(trace, number) for number, trace in enumerate(served_traces(24))]


def distillation(folder, examples, selection=None, progress=lambda *_: None, rate=3e-3):
    made = trainer(loss="forward_kl", learning_rate=rate)
    return Distillation(
        "run", folder, made, CONFIG, epochs=2, validation=examples[:4], selection=selection, progress=progress
    )


def without_clock(folder):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_metrics(folder)]


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("killed_at", [2, 3, 8])
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, examples, killed_at, selects):
    class Kill(BaseException):
        pass

    def kill(_run, figures, _total):
        if figures["step"] == killed_at:
            raise Kill

    selection = Selection(reference=one_layer_draft(), fraction=0.4, keep="random") if selects else None
    whole = distillation(tmp_path / "whole", examples, selection).run(lambda epoch, draft: examples[4:])
    with pytest.raises(Kill):
        distillation(tmp_path / "cut", examples, selection, kill).run(lambda epoch, draft: examples[4:])
    assert (tmp_path / "cut" / CHECKPOINT_NAME).exists() == (killed_at > 3)
    resumed = distillation(tmp_path / "cut", examples, selection).run(lambda epoch, draft: examples[4:])
    rows, expected = without_clock(tmp_path / "cut"), without_clock(tmp_path / "whole")
    assert len(rows) == len(expected) == 10
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4)  # sums differ in the last bit where memory is aligned otherwise
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(resumed.tensors[name], tensor, atol=1e-5, rtol=1e-4)
    assert sorted(file.name for file in (tmp_path / "cut").iterdir()) == [
        DRAFT_NAME, "metrics.jsonl", "step-000005.safetensors", "step-000010.safetensors"
    ]  # fmt: skip


def test_a_finished_run_is_read_and_a_damaged_checkpoint_is_said(tmp_path, examples):
    first = distillation(tmp_path, examples).run(lambda epoch, draft: examples[4:])

    def never(epoch, draft):
        raise AssertionError("nothing is left to train")

    again = distillation(tmp_path, examples).run(never)
    assert torch.equal(first.tensors["head"], again.tensors["head"])
    (tmp_path / DRAFT_NAME).unlink()
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match=r"damaged .*delete it"):
        distillation(tmp_path, examples).run(never)


def test_it_learns_and_says_so(tmp_path, examples):
    run = distillation(tmp_path, examples)
    before = Interval.of(run.alphas(one_layer_draft())).mean
    draft = run.run(lambda epoch, draft: examples)
    assert Interval.of(run.alphas(draft)).mean > before + 0.05
    rows = read_metrics(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["step"] for row in rows if "validation_alpha" in row] == [4, 8, 12]
    assert rows[-1]["flops"] == pytest.approx(12 * rows[0]["flops"], rel=0.2)  # measuring is not counted
    assert sum(example.num_tokens for example in examples) * 2 == rows[-1]["num_tokens"]


def test_a_rate_that_ruins_the_draft_is_one_sentence(tmp_path, examples):
    run = distillation(tmp_path, examples)
    with torch.no_grad():
        run.trainer.parameters["head"].fill_(torch.nan)
    with pytest.raises(UserError, match=r"step 1: .*lower --learning-rate"):
        run.run(lambda epoch, draft: examples[4:])


def test_the_split_follows_from_the_prompts(examples):
    train, validation = split(examples, 0.3)
    assert len(train) + len(validation) == len(examples)
    again = split(list(reversed(examples)), 0.3)
    assert {one.trace_id for one in again[1]} == {one.trace_id for one in validation}
    assert np.mean([is_validation([n, 2 * n, 7], 0.3) for n in range(2000)]) == pytest.approx(0.3, abs=0.04)
    with pytest.raises(UserError, match="more prompts"):
        split(examples[:1], 0.3)


def test_intervals_are_those_of_the_mean():
    values = np.random.default_rng(0).normal(0.5, 0.2, 400)
    interval = Interval.of(values)
    assert interval.mean == pytest.approx(values.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.2 / 20, rel=0.15)
    assert Interval.of([0.25] * 3).rounded() == {"mean": 0.25, "low": 0.25, "high": 0.25}


def test_what_selection_keeps():
    gains = torch.tensor([1.5, 0.1, -torch.inf, 0.9, -0.3, 0.8])
    keeps = {
        keep: Selection(reference=one_layer_draft(), fraction=0.4, keep=keep).chosen(gains, seed=1)
        for keep in ("top", "bottom", "random")
    }
    assert keeps["top"].nonzero()[:, 0].tolist() == [0, 3]
    assert keeps["bottom"].nonzero()[:, 0].tolist() == [1, 4]
    assert keeps["random"].sum() == 2
    assert not keeps["random"][2]
    made = Selection(reference=one_layer_draft(), fraction=0.4, keep="random")
    assert torch.equal(made.chosen(gains, seed=1), keeps["random"])
    assert len({tuple(made.chosen(gains, seed=seed).tolist()) for seed in range(20)}) > 3


def test_the_rate_follows_the_fraction_kept():
    config = DistillConfig(learning_rate=1e-2, select_fraction=0.4)
    assert rate_of(config) == pytest.approx(4e-3)
    assert rate_of(dataclasses.replace(config, rescale_rate=False)) == 1e-2
    made = trainer_at_rate(trainer(learning_rate=1e-2), 4e-3)
    assert made.learning_rate == 4e-3
    assert selection_of(one_layer_draft(), config).fraction == 0.4


# --- the target as a teacher ------------------------------------------------------------------------------------------


def test_the_full_teacher_knows_every_token(examples):
    """The toy vocabulary has 64 tokens, so that a trace's top 64 are all of them: the same numbers in another order."""
    made = trainer(draft=one_layer_draft(40))
    teacher = FullTeacher(decoder(MODEL))
    for every_position in (False, True):
        some = [dataclasses.replace(one, loss_mask_T=np.arange(one.num_positions) % 2 == 0) for one in examples[:3]]
        batch = collate(some, made.target_to_draft_V, every_position=every_position)
        full = teacher.in_full(batch, some, made.target_to_draft_V, every_position=every_position)
        assert full.teacher_rows_NK.shape == batch.teacher_rows_NK.shape
        gathered = full.teacher_log_probs_NK.gather(1, batch.teacher_token_ids_NK)
        torch.testing.assert_close(gathered, batch.teacher_log_probs_NK, atol=5e-3, rtol=1e-3)  # float16
        assert torch.equal(full.teacher_rows_NK.gather(1, batch.teacher_token_ids_NK), batch.teacher_rows_NK)
    top, all_ = trainer(loss="forward_kl"), trainer(loss="forward_kl")
    all_.teacher = teacher
    top.uses_bf16 = all_.uses_bf16 = False  # where a CPU has bf16 the teacher runs in it too, and near ties part
    for one, other in zip(top.score(examples[:4]), all_.score(examples[:4]), strict=True):
        assert one.alpha_t0 == other.alpha_t0
        assert one.alpha == pytest.approx(other.alpha, abs=2e-3)
    assert all_.step(examples[:4]).loss == pytest.approx(top.step(examples[:4]).loss, abs=2e-3)


def writer(num_slots=4):
    draft = one_layer_draft(50)
    target = decoder(MODEL, num_slots=num_slots)
    from tests.tiny import draft_model

    return Writer(draft_model(draft, target).decoder, draft.draft_to_target_W, target, eos_token_ids=[]), draft


PROMPTS = [[3, 5, 9], [7, 1], [2, 2, 2, 8], [40, 41], [11]]


def test_texts_without_the_draft_are_plain_decodings():
    made, _ = writer()
    outputs = made.write(PROMPTS, SamplingParams(max_tokens=12), lambda prompt, position: False, seed=0)
    expected = serve(
        tiny_engine(decoder(MODEL), None, k=0), [request(p, n, max_tokens=12) for n, p in enumerate(PROMPTS)]
    )
    assert outputs == expected


def test_the_drafts_texts_are_its_own_and_mixtures_are_in_between():
    made, draft = writer(num_slots=2)
    own = made.write(PROMPTS, SamplingParams(max_tokens=12), lambda prompt, position: True, seed=0)
    assert all(token in set(draft.draft_to_target_W.tolist()) for text in own for token in text)
    mixed = made.write(PROMPTS, SamplingParams(max_tokens=12), lambda prompt, position: position % 2 == 0, seed=0)
    # Each token is what its writer says after all that stands before it, by whomever it was written.
    for prompt, text in zip(PROMPTS, mixed, strict=True):
        for position in range(12):
            before = [[*prompt, *text[:position]]]
            next_one = made.write(before, SamplingParams(max_tokens=1), lambda p, q, n=position: n % 2 == 0, seed=0)
            assert next_one == [[text[position]]]
    assert own != mixed


def test_texts_end_where_they_must():
    made, _ = writer()
    made._eos = {made.write(PROMPTS[:1], SamplingParams(max_tokens=3), lambda p, q: True, seed=0)[0][2]}
    text = made.write(PROMPTS[:1], SamplingParams(max_tokens=40), lambda p, q: True, seed=0)[0]
    assert text[-1] in made._eos
    assert len(text) <= 3
    long = [list(range(60)) * 2]
    made._eos = set()
    assert len(made.write(long, SamplingParams(max_tokens=40), lambda p, q: False, seed=0)[0]) == 8  # 128 positions


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "spec"}, "method must be one of distillspec, adaspec"),
        ({"loss": "mse"}, "loss must be one of forward_kl, .*cross_entropy"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"reference_epochs": 0}, "reference_epochs"),
        ({"save_steps": -1}, "save_steps"),
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"averaging": 1.0}, "averaging"),
        ({"select_fraction": 0.0}, "select_fraction"),
        ({"student_share": 1.0}, "student_share"),
        ({"validation_share": 0.0}, "validation_share"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_settings_out_of_range_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        DistillConfig(**fields)


def test_a_run_is_of_prompts_or_of_traces():
    for fields in ({}, {"prompts": "a", "traces": "b"}):
        with pytest.raises(ValueError, match=r"either prompts .* or traces"):
            DistillRunConfig(**fields)
    with pytest.raises(ValueError, match="leave it out"):
        DistillRunConfig(traces="a", responses="given")
    for fields in ({"draft_layers": 0}, {"limit": 1}, {"concurrency": 0}, {"max_vocabulary_size": 0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            DistillRunConfig(prompts="a", **fields)


def test_metrics_are_lines_of_json(tmp_path, examples):
    distillation(tmp_path, examples).run(lambda epoch, draft: examples[4:])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert {"step", "loss", "train_alpha", "num_tokens", "flops"} <= json.loads(line).keys()
