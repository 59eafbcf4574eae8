"""Prompt files: what a line may hold, and what is said of one that is none."""

import json

import pytest

from livedraft.bench.prompts import read_rows
from livedraft.records import UserError


def test_a_text_may_hold_any_separator_but_the_one_between_lines(tmp_path):
    """U+2028 and its like end a line for Python, not for JSON lines; files from Windows end theirs with two characters."""
    text = "a box.\u2028The box holds\x85six balls\u2029and\x0cmore"
    rows = [{"turns": [text, "and then?"]}, {"messages": [{"role": "user", "content": "two"}], "response": "three"}]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\r\n\r\n")
    first, second = read_rows(str(file), None)
    assert first.messages == [{"role": "user", "content": text}]
    assert (first.second_turn, second.response) == ("and then?", "three")


def test_a_line_that_is_none_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a"]}\n{"turns": []}\n')
    with pytest.raises(UserError, match=r"Line 2 of .* is not a JSON object"):
        read_rows(str(file), None)
    assert len(read_rows(str(file), 1)) == 1
