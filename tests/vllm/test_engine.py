"""The part that runs inside vLLM, on a real engine with tiny models: what is tapped, what a swap does, what is refused."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from livedraft.device import ExecutionPath
from livedraft.engine.judging import judged_trace
from livedraft.models.open import open_model
from livedraft.records import EXPORTED_TARGET_KEY, TEACHER_TOP_K, Request
from tests.vllm.conftest import FINGERPRINT

PROMPTS = [[(7 * n + i) % 250 for i in range(10 + n)] for n in range(6)]
START = {"do": "start", "version": "first", "target": FINGERPRINT}
FLOAT32 = ExecutionPath(device=torch.device("cpu"), dtype=torch.float32, is_prepacked=False)


@pytest.fixture(scope="module")
def plain(inside, models):
    """Without a draft: what greedy decoding says, and what is tapped of it."""
    return inside([START, {"do": "generate", "prompts": PROMPTS}, {"do": "collect"}], target=models["target"])


@pytest.fixture(scope="module")
def drafted(inside, models, tmp_path_factory):
    """One engine's whole life: a bad draft, a good one, refused files, sampling, the tap off and on."""
    files = _broken_files(models["good"], tmp_path_factory.mktemp("broken"))
    good, bad = models["good"] / "model.safetensors", models["bad"] / "model.safetensors"
    refusals = [{"do": "swap", "file": file, "version": name, "as": f"refused {name}"} for name, file in files.items()]
    steps = [
        START,
        {"do": "generate", "prompts": PROMPTS, "as": "bad"},
        {"do": "collect", "as": "tapped"},
        {"do": "swap", "file": good, "version": "good", "as": "swap to good"},
        {"do": "generate", "prompts": PROMPTS, "as": "good"},
        {"do": "collect", "as": "tapped after"},
        *refusals,
        {"do": "generate", "prompts": PROMPTS, "as": "after refusals"},
        {"do": "generate", "prompts": PROMPTS, "temperature": 1.0, "seed": 3, "as": "sampled"},
        {"do": "collect", "as": "tapped sampled"},
        {"do": "generate", "prompts": PROMPTS[:2], "name": "livedraftprivate-", "as": "private"},
        {"do": "tap", "is_on": "off"},
        {"do": "generate", "prompts": PROMPTS[:2], "as": "untapped"},
        {"do": "collect", "as": "tapped of those"},
        {"do": "tap", "is_on": "on"},
        {"do": "swap", "file": bad, "version": "bad", "as": "swap to bad"},
        {"do": "generate", "prompts": PROMPTS, "as": "bad again"},
        {"do": "report"},
    ]
    return inside(steps, target=models["target"], draft=models["bad"], k=3)


def _broken_files(good, folder) -> dict:
    tensors = load_file(good / "model.safetensors")
    names = {EXPORTED_TARGET_KEY: FINGERPRINT}
    norm = "model.norm.weight"
    kinds = {
        "shape": ({**tensors, norm: tensors[norm][:32].clone()}, names),
        "type": ({**tensors, norm: tensors[norm].float()}, names),
        "fewer": ({name: tensor for name, tensor in tensors.items() if name != norm}, names),
        "more": ({**tensors, "model.extra.weight": torch.ones(2)}, names),
        "numbers": ({**tensors, norm: torch.full_like(tensors[norm], float("nan"))}, names),
        "foreign": (tensors, {EXPORTED_TARGET_KEY: "another"}),
    }
    files = {}
    for kind, (some, metadata) in kinds.items():
        files[kind] = folder / f"{kind}.safetensors"
        save_file(some, files[kind], metadata=metadata)
    files["truncated"] = folder / "truncated.safetensors"
    shutil.copyfile(good / "model.safetensors", files["truncated"])
    with files["truncated"].open("r+b") as file:
        file.truncate(10_000)
    return files


def test_only_the_records_and_torch_are_imported_inside(plain):
    assert plain["strangers"] == ["livedraft.records"]


def test_the_probe_finds_what_the_tap_rests_on(plain, drafted):
    for report in (plain, drafted):
        assert report["probe"]["problems"] == []
    assert drafted["probe"]["has_draft"] and not plain["probe"]["has_draft"]
    assert drafted["probe"]["num_speculative_tokens"] == 3


def test_sampling_on_a_cpu_is_found_broken_and_repaired(drafted):
    """Were it left alone, temperatures would be uninitialised memory: a draft that is the target would be refused."""
    assert drafted["probe"]["sampling"] == "repaired"
    assert drafted["sampled"]["acceptance"] > 0.95


def test_greedy_text_is_the_same_with_any_draft_and_without(plain, drafted):
    expected = plain["generate"]["texts"]
    for name in ("bad", "good", "after refusals", "bad again"):
        assert drafted[name]["texts"] == expected, name


def test_a_swap_changes_acceptance_and_nothing_else(drafted):
    """The drafts' heads are tied to their embeddings: one left at its old weights would show here."""
    assert drafted["bad"]["acceptance"] < 0.1
    assert drafted["good"]["acceptance"] > 0.95
    assert drafted["bad again"]["acceptance"] < 0.1
    assert drafted["swap to good"]["way"] == "draft weight update"
    assert drafted["swap to good"]["num_repacked"] >= 1
    assert drafted["swap to good"]["num_verified"] >= 12
    assert drafted["report"]["version"] == "bad"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "has shape [32], and the draft's is [64]"), ("type", "is F32, and the draft's is BF16"),
        ("fewer", "lacks model.norm.weight"), ("more", "holds model.extra.weight"), ("numbers", "no numbers"),
        ("foreign", "trained for target another"), ("truncated", "truncated.safetensors is missing, damaged"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_before_the_engine_is_touched(drafted, kind, words):
    assert words in drafted[f"refused {kind}"]["refused"]
    assert drafted["report"]["failure"] == ""


def test_what_is_tapped_is_what_the_target_says(plain, drafted, models):
    """Against the target run by livedraft itself in float32, at every position: first tokens, accepted and recovered ones."""
    target = open_model(models["target"], FLOAT32).runtime(num_slots=1, max_length=512)
    assert len(plain["collect"]) == len(drafted["tapped"]) == len(drafted["tapped after"]) == len(PROMPTS)
    for tapped in (plain["collect"], drafted["tapped"], drafted["tapped after"]):
        by_prompt = {len(one["prompt_token_ids"]): one for one in tapped}
        for prompt, text in zip(PROMPTS, plain["generate"]["texts"], strict=True):
            one = by_prompt[len(prompt)]
            assert one["prompt_token_ids"] == prompt
            output = one["output_token_ids_T"]
            assert output[: len(text)] == text  # a round may verify more than max_tokens
            ours = judged_trace(target, Request(id="x", prompt_token_ids=tuple(prompt)), text, "")
            _compare(one, ours, len(text))


def _compare(one: dict, ours, T: int) -> None:
    ids_TK, log_probs_TK = np.array(one["teacher_token_ids_TK"])[:T], np.array(one["teacher_log_probs_TK"])[:T]
    assert ids_TK.shape == (T, TEACHER_TOP_K)
    probs_TV = np.zeros((2, T, 258))
    for row, (ids, logs) in enumerate(((ids_TK, log_probs_TK), (ours.teacher_token_ids_TK, ours.teacher_log_probs_TK))):
        np.put_along_axis(probs_TV[row], ids.astype(int), np.exp(logs.astype(float)), axis=1)
    # bf16 logits against float32 ones: half the sum of differences, at each position.
    assert (np.abs(probs_TV[0] - probs_TV[1]).sum(1) / 2).mean() < 0.03
    tail_T = np.array(one["tail_mass_T"])[:T]
    assert np.abs(tail_T + np.exp(log_probs_TK).sum(1) - 1).max() < 2e-3


def test_drafted_positions_are_recorded_with_the_verdict(drafted):
    for one in drafted["tapped"] + drafted["tapped after"]:
        position, accepted = np.array(one["drafted_position_P"]), np.array(one["drafted_accepted_P"])
        off_path, tokens = np.array(one["drafted_off_path_P"]), np.array(one["drafted_token_id_P"])
        output = np.array(one["output_token_ids_T"])
        assert len(position) >= 3 and not (accepted & off_path).any()
        assert (tokens[accepted] == output[position[accepted]]).all()
        rejected = ~accepted & ~off_path
        assert (tokens[rejected] != output[position[rejected]]).all()  # greedy: a rejected token is another
        assert (np.array(one["drafted_target_log_prob_P"]) <= 1e-3).all()
    assert all(one["draft_version"] == "first" for one in drafted["tapped"])
    assert all(one["draft_version"] == "good" for one in drafted["tapped after"])
    assert drafted["tapped after"][0]["version_T"][0] == "none"  # the first token has no proposal
    assert set(drafted["tapped after"][0]["version_T"][1:]) == {"good"}


def test_private_requests_and_those_with_the_tap_off_leave_nothing(drafted):
    assert drafted["tapped of those"] == []
    assert drafted["tap"]["tap"] in (True, False) and drafted["report"]["tap"] is True


def test_sampled_requests_carry_their_parameters_and_the_drafts_probabilities(drafted):
    assert len(drafted["tapped sampled"]) == len(PROMPTS) * 2  # those after the refusals too
    sampled = [one for one in drafted["tapped sampled"] if one["sampling"]["temperature"] == 1.0]
    assert len(sampled) == len(PROMPTS)
    for one in sampled:
        assert one["sampling"]["seed"] == 3
        drawn, target = np.array(one["drafted_log_prob_P"]), np.array(one["drafted_target_log_prob_P"])
        assert (drawn < 0).any()
        assert np.abs(drawn - target)[~np.array(one["drafted_off_path_P"])].mean() < 0.1  # the draft is the target
