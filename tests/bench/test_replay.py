"""`bench replay` on a tiny model over the real command line: live, recorded again, the other arms."""

import importlib.util
import json

import pytest

from livedraft.bench.replay import _ordered
from livedraft.records import UserError
from tests.e2e.in_process import livedraft
from tests.e2e.test_cli import assert_one_sentence

KEYS = {
    "alpha_by_100", "alpha_window_50", "alpha_first_100", "alpha_last_100", "requests", "versions_promoted",
    "tokens_per_second", "train_seconds", "train_flops", "serve_flops", "segments",
}  # fmt: skip


def replay(*arguments):
    result = livedraft("bench", "replay", "--max-tokens", 40, "--dtype", "float32", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_prompts_come_in_sequence_mixed_or_returning():
    files = {"a": list(range(6)), "b": [10, 11, 12]}
    assert [x for _, x in _ordered(files, 3, shift=False, mix=False, seed=0)] == [0, 1, 2, 10, 11, 12]
    returning = _ordered(files, 3, shift=True, mix=False, seed=0)
    assert returning[-3:] == [("a again", 3), ("a again", 4), ("a again", 5)]
    mixed = _ordered(files, 3, shift=False, mix=True, seed=0)
    assert sorted(mixed) == sorted(_ordered(files, 3, shift=False, mix=False, seed=0)) != mixed
    for broken in ({}, {"b": [10, 11, 12]}):
        with pytest.raises(UserError):
            _ordered(broken, 3, shift=True, mix=False, seed=0)


@pytest.fixture(scope="module")
def prompt_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    for name in ("sums", "words"):
        lines = [json.dumps({"turns": [f"{name} number {n}, about {n % 5} things"]}) for n in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder / "sums.jsonl", folder / "words.jsonl"


@pytest.mark.timeout(300)
def test_the_live_arm_is_its_recorded_rerun(model_folder, prompt_files, tmp_path):
    traces, state = tmp_path / "traces.safetensors", tmp_path / "state"
    live = replay(
        "--model", model_folder, "--prompts", prompt_files[0], "--limit", 56, "--save-traces", traces, "--state", state,
        "--learning-rate", 3e-3,
    )  # fmt: skip
    assert live.keys() >= KEYS
    assert live["requests"] == 56
    assert live["serve_flops"] > 0
    assert live["tokens_per_second"] > 0
    assert live["versions_promoted"] > 0
    again = replay(
        "--model", model_folder, "--from-traces", traces, "--learning-rate", 3e-3,
        "--arm", "livedraft", "--arm", "osd", "--arm", "static:INIT", "--arm", f"static:{live['last_version']}",
        "--arm", "static:20%", "--arm", "static:100%",
    )  # fmt: skip
    arms = again["arms"]
    recorded = arms["livedraft"]
    assert recorded["alpha_first_100"] == pytest.approx(live["alpha_first_100"], abs=0.01)
    for one, other in zip(recorded["alpha_window_50"], live["alpha_window_50"]):
        assert one == pytest.approx(other, abs=0.02)
    assert all(arm.keys() >= KEYS and arm["requests"] == 56 for arm in arms.values())
    for learnt in (recorded, arms["osd"]):
        assert learnt["alpha_last_100"] > arms["static:INIT"]["alpha_last_100"]
    learnt = arms[f"static:{live['last_version']}"]
    assert learnt["alpha_last_100"] > arms["static:INIT"]["alpha_last_100"]
    assert learnt["train_seconds"] == 0
    on_few, on_all = arms["static:20%"], arms["static:100%"]
    assert arms["static:INIT"]["alpha_last_100"] < on_few["alpha_last_100"] < on_all["alpha_last_100"]
    assert 0 < on_few["train_flops"] < on_all["train_flops"]


@pytest.mark.timeout(240)
def test_recording_alone_is_plain_and_segments_are_kept_apart(model_folder, prompt_files, tmp_path):
    files = []
    for prompts in prompt_files:
        file = tmp_path / f"{prompts.stem}.traces"
        files += ["--from-traces", file]
        fields = replay(
            "--model", model_folder, "--prompts", prompts, "--limit", 20, "--arm", "static:INIT", "--save-traces", file
        )
        assert fields["versions_promoted"] == 0
        assert [segment["name"] for segment in fields["segments"]] == [prompts.stem]
    plot = ("--plot", tmp_path / "curve.svg") if importlib.util.find_spec("matplotlib") else ()
    both = replay("--model", model_folder, *files, "--limit", 10, "--shift", "--arm", "static:INIT", *plot)
    assert not plot or "</svg>" in plot[1].read_text()
    assert [(s["name"], s["requests"]) for s in both["segments"]] == [("sums", 10), ("words", 10), ("sums again", 10)]


def test_what_cannot_be_replayed_is_one_sentence(model_folder, tmp_path):
    here = ("bench", "replay", "--model", model_folder, "--dtype", "float32")
    assert_one_sentence(livedraft(*here), "needs --prompts")
    (tmp_path / "x").write_bytes(b"no traces")
    assert_one_sentence(livedraft(*here, "--from-traces", tmp_path / "x"), "cannot be read as recorded traces")
