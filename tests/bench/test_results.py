"""`bench table`: the outputs of the three benches become rows, and README's table is what the command prints."""

import json
import re
from pathlib import Path

import pytest

from livedraft.bench.machine import run_record
from livedraft.bench.results import BEGIN, END, rendered
from livedraft.records import UserError
from tests.e2e.in_process import livedraft

ROOT = Path(__file__).parents[2]
RUN = {"command": "livedraft x", "machine": "a machine", "date": "2026-12-01", "seeds": [0, 1], "data": "sums"}


def figure(mean):
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}


STUDY = {
    "run": RUN, "seeds": [0, 1],
    "selection": {
        "distillspec": {"alpha": figure(0.4)},
        "top 0.4, full rate": {"alpha": figure(0.38), "equal steps": figure(-0.02), "equal selected tokens": figure(0.005)},
    },
    "losses": {"greedy responses": {"tvd": {"alpha": figure(0.3)}, "jsd": {"failed": "it blew up"}}},
}  # fmt: skip
REPLAY = {
    "seed": 3,
    "arms": {
        arm: {"segments": [{"name": "words", "requests": 300, "alpha_first_100": 0.2, "alpha_last_100": 0.41}]}
        for arm in ("livedraft", "osd", "static:INIT", "static:30%", "static:somewhere")
    },
}
DISTILL = {
    "initial_alpha": {"mean": 0.08}, "distillspec_alpha": figure(0.4), "adaspec_alpha": figure(0.36),
    "distillspec_training": {"step": 45}, "adaspec_training": {"step": 45}, "adaspec_minus_distillspec": figure(-0.04),
}  # fmt: skip


def table(folder, **results):
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return rendered(folder)


def test_each_kind_of_output_becomes_rows(tmp_path):
    text = table(tmp_path, a_study=STUDY, b_replay=REPLAY, c_distill=DISTILL)
    run = f"[1]({tmp_path}/a_study.json)"
    assert f"| sums | DistillSpec | .400 [.390, .410] | – | – | – | {run} |" in text
    steps, selected = "−.020 [−.030, −.010]", "+.005 [−.005, +.015]"
    assert f"| sums | AdaSPEC, top 40 %, full rate | .380 [.370, .390] | {steps} | – | {selected} | {run} |" in text
    assert "| sums | DistillSpec, jsd, greedy responses, one seed | failed |" in text
    for draft in (
        "livedraft, online", "OSD as published, online", "untrained, never trained",
        "DistillSpec on the stream's first 30 %, then static", "distilled before, then static",
    ):  # fmt: skip
        assert f"| words | {draft} | .200 → .410 |" in text
    assert "| c_distill | untrained | .080 |" in text
    assert "| c_distill | AdaSPEC | .360 [.350, .370] | −.040 [−.050, −.030] |" in text
    assert "| DistillSpec, draft_layers 4, source student | .400" in table(
        tmp_path, c_distill=DISTILL | {"run": RUN | {"settings": {"draft_layers": 4, "source": "student"}}}
    )
    assert "| sums, 4 layers | DistillSpec | .400" in table(tmp_path, a_study=STUDY | {"layers": 4})
    assert "1. `livedraft x`; seeds 0, 1; a machine; 2026-12-01" in text
    assert "2. command not kept; seeds 3; machine not kept" in text


def test_unequal_steps_are_not_called_equal(tmp_path):
    assert "−.040" not in table(tmp_path, run=DISTILL | {"adaspec_training": {"step": 90}})


def test_what_is_no_result_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no \.json file"):
        rendered(tmp_path)
    for broken, words in (([1], "no output of"), ({"selection": {"distillspec": {}}}, "lacks a figure")):
        with pytest.raises(UserError, match=words):
            table(tmp_path, run=broken)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        rendered(tmp_path)


def test_it_replaces_what_lies_between_the_markers_and_nothing_else(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(DISTILL))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        assert livedraft("bench", "table", tmp_path, "--write", page).returncode == 0
        assert page.read_text() == f"before\n{BEGIN}\n{rendered(tmp_path, page=page)}{END}\nafter\n"
        assert "[1](run.json)" in page.read_text()
    assert json.loads(livedraft("bench", "table", tmp_path, "--json").stdout)["table"] == rendered(tmp_path)
    page.write_text("no markers")
    refused = livedraft("bench", "table", tmp_path, "--write", page)
    assert refused.returncode == 1
    assert BEGIN in refused.stderr
    assert page.read_text() == "no markers"


def test_a_brief_table_has_the_main_rows_and_every_origin(tmp_path):
    study = STUDY | {"selection": STUDY["selection"] | {"top 0.4": {"alpha": figure(0.37)}}}
    whole = table(tmp_path, a_study=study, b_replay=REPLAY)
    brief = rendered(tmp_path, is_brief=True)
    assert "full rate" in whole and "tvd" in whole
    assert "full rate" not in brief and "tvd" not in brief
    assert "AdaSPEC, top 40 % |" in brief and "OSD as published" in brief
    assert whole.splitlines()[-2:] == brief.splitlines()[-2:]


@pytest.mark.parametrize(("file", "options"), [("README.md", ["--brief"]), ("docs/experiments.md", [])])
def test_documents_hold_what_the_command_writes(monkeypatch, file, options):
    monkeypatch.chdir(ROOT)
    page = Path(file)
    between = page.read_text(encoding="utf-8").partition(BEGIN + "\n")[2].partition(END)[0]
    command = f"livedraft bench table docs/results {' '.join(options)} --write {file}"
    assert between == rendered(Path("docs/results"), is_brief=bool(options), page=page), f"stale: {command}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_kept_results_say_where_they_are_from_and_name_no_folder_of_a_machine(path):
    text = path.read_text()
    about = json.loads(text)["run"]
    assert about.keys() >= {"command", "machine", "date", "seeds", "data"}
    assert not re.search(r"[\s\"=:]/(?!s\b)\w", text)
    assert len(text) < 20_000


def test_a_run_says_by_which_command_without_this_machines_folders(monkeypatch):
    arguments = [
        "/usr/bin/livedraft", "bench", "replay", "--prompts", "/data/sums.jsonl", "--arm", "static:/runs/one", "--model",
        "org/name", "--config=/etc/a.toml", "--from-traces", "../b.st",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", arguments)
    about = run_record(data=("/data/sums.jsonl", "hub:openai/gsm8k:main:train:question"), seeds=(3,))
    assert about["command"] == (
        "livedraft bench replay --prompts sums.jsonl --arm static:one --model org/name --config=a.toml --from-traces b.st"
    )
    assert about["data"] == "sums, openai/gsm8k"
    assert about["seeds"] == [3]
    assert about["machine"]
