"""`--json`: standard output is one JSON object and nothing else, whatever the verb says on standard error."""

import json

import pytest

from livedraft import LLM, SamplingParams
from livedraft.drafts.registry import Registry
from tests.cli.test_verbs import verbs
from tests.docs.markdown import ROOT
from tests.e2e.in_process import livedraft
from tests.learning.toy import one_layer_draft
from tests.server.test_admin import publish

PROMPTS = [f"question number {number}" for number in range(6)]
OF_MODEL = ("--model", "MODEL", "--dtype", "float32", "--threads", 1)
CASES = {
    "generate": ("hello", *OF_MODEL, "--max-tokens", 4),
    "config show": (),
    "doctor": ("MODEL", "--port", 0, "--state", "NEW/state"),
    "drafts list": ("--state", "STATE"),
    "drafts show": ("VERSION", "--state", "STATE"),
    "drafts diff": ("VERSION", "VERSION", "--state", "STATE"),
    "drafts export": ("VERSION", "NEW/draft", "--model", "MODEL", "--state", "STATE"),
    "drafts import": ("STATE/drafts/VERSION", "--model", "MODEL", "--state", "STATE"),
    "drafts promote": ("VERSION", "--state", "STATE"),
    "drafts routes": ("--state", "STATE"),
    "learn status": ("--state", "STATE"),
    "learn pause": ("--state", "STATE"),
    "learn resume": ("--state", "STATE"),
    "learn now": ("--state", "STATE"),
    "traces list": ("--state", "STATE"),
    "traces export": ("NEW/traces.jsonl", "--model", "MODEL", "--state", "STATE"),
    "traces import": ("PROMPTS", *OF_MODEL, "--state", "NEW/state", "--max-tokens", 4, "--limit", 2),
    "traces delete": ("--user", "nobody", "--state", "STATE"),
    "bench lengths": (
        "--prompts", "PROMPTS", *OF_MODEL, "--limit", 2, "--fixed", "1,2", "--together", 2, "--max-tokens", 6,
    ),
    "bench limits": OF_MODEL,
    "bench scale": ("--replicas", "1,2", "--hours", 0.1),
    "bench speed": ("--prompts", "PROMPTS", *OF_MODEL, "--limit", 1, "--max-tokens", 4),
}  # fmt: skip
ELSEWHERE = {
    "drafts rollback": "tests/cli/test_json.py",
    "drafts close": "tests/cli/test_json.py",
    "demo": "tests/e2e/test_demo.py",
    "distill": "tests/e2e/test_distill.py",
    "export-target": "tests/cli/test_json.py",
    "pull": "tests/cli/test_json.py",
    "bench acceptance": "tests/bench/test_acceptance.py",
    "bench compare": "tests/bench/test_compare.py",
    "bench distill": "tests/bench/test_distill_study.py",
    "bench growth": "tests/bench/test_compare.py",
    "bench proposers": "tests/bench/test_proposers.py",
    "bench replay": "tests/bench/test_replay.py",
    "bench routes": "tests/bench/test_routes.py",
    "bench serve": "tests/e2e/test_serve.py",
    "bench table": "tests/bench/test_results.py",
    "bench unhelpful": "tests/bench/test_compare.py",
}
"""Minutes long, or needing more than a folder of drafts: the file of the test that reads its --json."""
NOT_RUN = {
    "bench gpu": "five minutes on a GPU; its parts are tested in tests/bench/test_gpu.py",
}


@pytest.fixture(scope="module")
def served(model_folder, tmp_path_factory):
    """(folder of drafts and traces, its version, a file of prompts)."""
    state = tmp_path_factory.mktemp("json") / "state"
    with LLM(str(model_folder), state=state, learn=True, dtype="float32", num_threads=1) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    prompts = state.with_name("prompts.jsonl")
    prompts.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in PROMPTS))
    return state, Registry(state).in_service("default").id, prompts


def one_object(result):
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)  # raises for anything before or after it
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("verb", CASES)
def test_standard_output_is_one_object(verb, served, model_folder, tmp_path):
    state, version, prompts = served
    names = {"MODEL": model_folder, "STATE": state, "VERSION": version, "PROMPTS": prompts, "NEW": tmp_path}

    def filled(word):
        for name, value in names.items():
            word = str(word).replace(name, str(value))
        return word

    assert one_object(livedraft(*verb.split(), *map(filled, CASES[verb]), "--json"))


def test_what_changes_what_serves_is_one_object_too(tmp_path):
    before, after = (
        publish(tmp_path, one_layer_draft(), number, status) for number, status in enumerate(("retired", "in_service"))
    )
    publish(tmp_path, one_layer_draft(), 2, "in_service", route="shop")
    here = ("--state", tmp_path, "--json")
    assert before.id in one_object(livedraft("drafts", "rollback", *here))["message"]
    assert Registry(tmp_path).version(after.id)["status"] == "rolled_back"
    assert "shop" in one_object(livedraft("drafts", "close", "shop", *here))["message"]


@pytest.mark.model
def test_a_model_that_is_here_is_pulled_as_one_object(smollm2_path):
    assert one_object(livedraft("pull", "smollm2-135m", "--json"))["path"] == str(smollm2_path)


@pytest.mark.long
@pytest.mark.model
def test_an_exported_target_is_one_object(smollm2_path, tmp_path):
    file = tmp_path / "target.gguf"
    assert one_object(livedraft("export-target", file, "--json"))["file"] == str(file)


def test_every_verb_with_json_is_tried_here_or_where_it_says():
    with_json = {name for name, command in verbs() if any("--json" in option.opts for option in command.params)}
    known = [*CASES, *ELSEWHERE, *NOT_RUN]
    assert len(known) == len(set(known))
    assert {name for name in with_json if not name.startswith("vllm")} == set(known)
    for verb, file in ELSEWHERE.items():
        text = (ROOT / file).read_text()
        assert "--json" in text, file
        assert all(f'"{word}"' in text for word in verb.split()), (verb, file)
