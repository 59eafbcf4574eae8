"""Tool calls in generated text: the two formats open models write, Hermes/Qwen (`<tool_call>{...}</tool_call>`) and Llama 3
(the whole answer is one JSON object)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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
            calls = _parse_blocks(held)
            if calls:
                return "", calls
        elif not self._given_out:
            call = _parse(held.strip())
            if call:
                return "", [call]
        return held, []


def _parse_blocks(text: str) -> list[ParsedCall]:
    """All of the text as tool-call blocks; empty where something else is there too."""
    calls: list[ParsedCall] = []
    rest = text.strip()
    while rest:
        block, is_closed, rest = rest.removeprefix(_OPEN).partition(_CLOSE)
        call = _parse(block.strip())
        if call is None or not is_closed:
            return []
        calls.append(call)
        rest = rest.strip()
        if rest and not rest.startswith(_OPEN):
            return []
    return calls


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
