"""Prompt files: JSON lines with `messages` (OpenAI form) or `turns` (the first one is used)."""

from __future__ import annotations

import json
from pathlib import Path

from livedraft.records import UserError
from livedraft.tokenizer import Message


def read_prompts(path: Path, limit: int) -> list[list[Message]]:
    """The first `limit` prompts. Raises UserError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The prompt file {path} cannot be read ({error}).") from error
    prompts: list[list[Message]] = []
    for number, line in enumerate(lines, start=1):
        if len(prompts) == limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row["turns"][0]}]
        except (json.JSONDecodeError, KeyError, IndexError, AttributeError, TypeError) as error:
            raise UserError(f"Line {number} of {path} is not a JSON object with `messages` or `turns`.") from error
        prompts.append(messages)
    if not prompts:
        raise UserError(f"The prompt file {path} holds no prompt.")
    return prompts
