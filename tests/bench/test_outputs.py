import pytest

from livedraft.bench import outputs
from livedraft.records import UserError
from tests.e2e.in_process import livedraft


def test_what_could_not_be_written_in_the_end_is_said_at_once(tmp_path, monkeypatch):
    outputs.check_outputs(files=(tmp_path / "traces.st", None), plot=None)
    for path in (tmp_path / "no" / "where.st", tmp_path):
        with pytest.raises(UserError, match="could not be written in the end"):
            outputs.check_outputs(files=(path,))
    monkeypatch.setattr(outputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="matplotlib"):
        outputs.check_outputs(plot=tmp_path / "curve.svg")


@pytest.mark.parametrize("command", [("bench", "growth"), ("bench", "replay", "--prompts", "unread.jsonl")])
def test_before_anything_is_measured(command, tmp_path):
    result = livedraft(*command, "--plot", tmp_path / "no" / "where.svg")
    assert result.returncode == 1
    assert "where.svg" in result.stderr or "matplotlib" in result.stderr
