"""Tool calls in generated text: the two formats open models write, Hermes/Qwen (`<tool_call>{...}</tool_call>`) and Llama 3
(the whole answer is one JSON object)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"{_OPEN}\s*(.*?)\s*{_CLOSE}", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ParsedCall:
    name: str
    arguments: str
    """JSON text, as OpenAI's API has it."""


@dataclass(kw_only=True)
class ToolCallText:
    """Splits a stream of text into content, given out at once, and tool calls, known at the end."""

    _held: str = ""
    _given_out: str = field(default="")

    def push(self, text: str) -> str:
        """Content that is certain: nothing of what is or may become a tool call."""
        self._held += text
        if not self._given_out and self._held.lstrip()[:1] in ("", "{"):
            return ""  # nothing but a JSON object so far, perhaps Llama 3's form
        end = self._held.find(_OPEN)
        if end < 0:
            overlap = next((n for n in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:n])), 0)
            end = len(self._held) - overlap
        content, self._held = self._held[:end], self._held[end:]
        self._given_out += content
        return content

    def finish(self) -> tuple[str, list[ParsedCall]]:
        """The rest of the content, and the calls. What does not parse is content, as the model wrote it."""
        held, self._held = self._held, ""
        if _OPEN in held:
            calls = [_parse(block) for block in _BLOCK.findall(held)]
            if calls and all(calls) and not _BLOCK.sub("", held).strip():
                return "", [call for call in calls if call]
        elif not self._given_out:
            call = _parse(held.strip())
            if call:
                return "", [call]
        return held, []


def _parse(text: str) -> ParsedCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return ParsedCall(name=call["name"], arguments=arguments)
    return ParsedCall(name=call["name"], arguments=json.dumps(arguments)) if isinstance(arguments, dict) else None
