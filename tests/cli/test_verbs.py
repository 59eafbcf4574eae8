"""The verb table as a whole: what every verb has, what a typing mistake gets, what a script can rely on."""

import json
import subprocess
import sys

import pytest
import typer

from livedraft import __version__
from livedraft.cli.main import app
from livedraft.config import ServerConfig
from tests.e2e.in_process import livedraft
from tests.e2e.test_cli import real_livedraft

NO_JSON = {
    "serve": "runs until it is stopped; /metrics, /admin and /health are its figures",
    "vllm serve": "the same",
    "chat": "a conversation",
    "config reference": "prints Markdown",
}


def verbs(command=None, path=()):
    """(words, command) of every verb."""
    command = command or typer.main.get_command(app)
    for name, child in getattr(command, "commands", {None: None}).items():
        if name is None:
            yield " ".join(path), command
        else:
            yield from verbs(child, (*path, name))


def test_every_verb_can_print_json_or_says_here_why_not():
    without = {name for name, command in verbs() if not any("--json" in option.opts for option in command.params)}
    assert without == set(NO_JSON)


def test_every_verb_and_every_option_has_a_help_text():
    for name, command in verbs():
        assert command.help, name
        for option in command.params:
            assert getattr(option, "help", "x") or option.name == "help", (name, option.name)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["srve"], "serve"),
        (["drafts", "lst"], "list"),
        (["learn", "stats"], "status"),
        (["serve", "--prot", "1"], "--port"),
    ],
)
def test_what_is_mistyped_gets_a_suggestion_and_exit_code_2(words, meant):
    result = livedraft(*words)
    assert result.returncode == 2
    assert meant in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "meant"),
    [("LIVEDRAFT_SERVER_PORT", "LIVEDRAFT_SERVER__PORT"), ("LIVEDRAFT_KERNEL", "LIVEDRAFT_KERNELS")],
)
def test_a_mistyped_variable_gets_a_suggestion(name, meant):
    result = livedraft("config", "show", **{name: "1"})
    assert result.returncode == 1
    assert f"did you mean {meant}?" in result.stderr


def test_variables_that_are_read_elsewhere_are_no_settings():
    assert livedraft("config", "show", LIVEDRAFT_KERNELS="torch", LIVEDRAFT_MODELS="/x").returncode == 0


def test_values_that_are_refused_are_exit_code_1():
    result = livedraft("serve", "--learner", "none", "--port", 0)
    assert (result.returncode, result.stderr) == (1, "livedraft: --learner must be livedraft or osd, got 'none'.\n")
    with pytest.raises(ValueError, match="status_seconds"):
        ServerConfig(status_seconds=-1)


def test_version_and_no_verb():
    assert livedraft("--version").stdout.strip() == __version__
    assert "doctor" in livedraft().stderr + livedraft().stdout


def test_the_shell_completes_verbs_and_options():
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # whatever started these tests is perhaps no shell
    assert "_LIVEDRAFT_COMPLETE" in real_livedraft("--show-completion", "bash", **named).stdout
    for words, meant in (("livedraft drafts pr", "promote"), ("livedraft serve --max-q", "--max-queue")):
        count = str(len(words.split()) - 1)
        asked = {"_LIVEDRAFT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
        assert real_livedraft(**asked).stdout.split() == [meant]


def test_the_shell_completes_versions_of_the_state_that_is_named(tmp_path):
    for name in ("v0001-aaaaaa", "v0002-bbbbbb", "v0003-cccccc"):
        (tmp_path / "drafts" / name).mkdir(parents=True)
        if name != "v0003-cccccc":  # a leftover that is no version
            (tmp_path / "drafts" / name / "manifest.json").write_text("{}")
    words = f"livedraft drafts show --state {tmp_path} v0"
    asked = {"_LIVEDRAFT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "5"}
    assert real_livedraft(**asked).stdout.split() == ["v0001-aaaaaa", "v0002-bbbbbb"]


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m livedraft config reference | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "# Configuration\n"
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_what_is_done_to_a_state_is_a_sentence_or_one_object(tmp_path):
    from livedraft.drafts.database import open_database

    with open_database(tmp_path):
        pass
    said = livedraft("learn", "pause", "--state", tmp_path)
    assert said.stdout == "Learning is paused; serving goes on with the draft it has.\n"
    assert json.loads(livedraft("learn", "resume", "--state", tmp_path, "--json").stdout) == {
        "message": "Learning goes on."
    }
    assert json.loads(livedraft("traces", "delete", "--all", "--state", tmp_path, "--json").stdout)[
        "message"
    ].startswith("0 ")
