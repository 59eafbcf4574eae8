"""Prompt files: JSON lines with `messages` (OpenAI form) or `turns` (the first one is used), and perhaps a `response`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from livedraft.records import UserError
from livedraft.tokenizer import Message, Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Row:
    messages: list[Message]
    response: str | None = None
    """What was answered: the row's `response`, or its last message when that is the assistant's."""
    topic: str | None = None
    second_turn: str | None = None
    """What the user says after the first answer: the second of `turns`."""


def as_prompt(tokenizer: Tokenizer, row: Row) -> str | list[Message]:
    """Messages, or one text for a model that knows no chat."""
    if tokenizer.has_chat_template:
        return row.messages
    return "\n".join(str(message["content"]) for message in row.messages) + "\n"


def read_prompts(path: Path, limit: int) -> list[list[Message]]:
    """The first `limit` prompts. Raises UserError naming the line that is wrong."""
    return [row.messages for row in read_rows(str(path), limit)]


def read_rows(source: str, limit: int | None) -> list[Row]:
    """The first `limit` rows of a file, or of a data set `hub:DATASET:CONFIG:SPLIT:PROMPT_COLUMN[:RESPONSE_COLUMN]`. Raises
    UserError naming what is wrong."""
    return _from_hub(source, limit) if source.startswith("hub:") else _from_file(Path(source), limit)


def spread(rows: Sequence[T], limit: int) -> list[T]:
    """So many, from the whole of a file: some are sorted by language or topic."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


def _from_file(path: Path, limit: int | None) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").split(
            "\n"
        )  # splitlines ends a line at U+2028 too, which JSON may hold
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The prompt file {path} cannot be read ({error}).") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if len(rows) == limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row["turns"][0]}]
            response = row.get("response")
            if response is None and row.get("messages") and messages[-1]["role"] == "assistant":
                response, messages = messages[-1]["content"], messages[:-1]
        except (json.JSONDecodeError, KeyError, IndexError, AttributeError, TypeError) as error:
            raise UserError(f"Line {number} of {path} is not a JSON object with `messages` or `turns`.") from error
        if response is not None and not isinstance(response, str):
            raise UserError(f"Line {number} of {path} has a `response` that is no text.")
        topic = row.get("topic")
        turns = row.get("turns") or []
        rows.append(
            Row(
                messages=messages, response=response, topic=None if topic is None else str(topic),
                second_turn=str(turns[1]) if len(turns) > 1 else None,
            )
        )  # fmt: skip
    if not rows:
        raise UserError(f"The prompt file {path} holds no prompt.")
    return rows


def _from_hub(source: str, limit: int | None) -> list[Row]:
    parts = source.split(":")
    if len(parts) not in (5, 6):
        raise UserError(f"{source} must read hub:DATASET:CONFIG:SPLIT:PROMPT_COLUMN[:RESPONSE_COLUMN].")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError("Prompts of the Hugging Face hub need the package datasets: pip install datasets.") from error
    try:
        data = load_dataset(parts[1], parts[2] or None, split=parts[3])
        rows = data.select(range(min(limit or len(data), len(data))))
        return [
            Row(
                messages=[{"role": "user", "content": row[parts[4]]}],
                response=row[parts[5]] if len(parts) == 6 else None,
            )
            for row in rows
        ]
    except Exception as error:  # the library raises many kinds; the first line says what it is
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{source} could not be read: {first_line}") from error
