"""From the engine's updates to OpenAI's JSON: whole response objects, or the chunks of a stream.

One `Choice` a requested completion assembles text and log-probabilities the same way for both, so joined stream pieces equal
the whole.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from livedraft.records import Request, RequestCounts, TokenLogprobs, Update, text_token_ids
from livedraft.server.errors import ApiError
from livedraft.server.tool_calls import ParsedCall, ToolCallText
from livedraft.tokenizer import TextStream, Tokenizer


@dataclass(kw_only=True)
class Job:
    """One HTTP request, ready to run: its engine requests and how to answer."""

    id: str
    model: str
    is_chat: bool
    requests: list[Request]
    choices: list[Choice]
    num_prompt_tokens: int
    """Each prompt once, however many choices it has."""
    num_choices: int
    """Of each prompt."""
    created: int = field(default_factory=lambda: int(time.time()))
    is_stream: bool
    includes_usage: bool
    reports_counts: bool
    metadata: dict[str, str]
    fingerprint: str

    # --- the answer as a whole --------------------------------------------------------------------------------------

    def response(self) -> dict[str, Any]:
        body = self._envelope("chat.completion" if self.is_chat else "text_completion")
        body["choices"] = [choice.whole() for choice in self.choices]
        body["usage"] = self.usage()
        if self.metadata:
            body["metadata"] = self.metadata
        if self.reports_counts:
            body["metrics"] = self._metrics()
        return body

    def usage(self) -> dict[str, Any]:
        num_prompt = self.num_prompt_tokens
        num_output = sum(choice.num_tokens for choice in self.choices)
        counts = [choice.counts for choice in self.choices if choice.counts is not None]
        accepted = sum(one.num_accepted_prediction_tokens for one in counts)
        first_choices = [choice.counts for choice in self.choices[:: self.num_choices] if choice.counts is not None]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_prompt_tokens for one in first_choices)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(one.num_prediction_tokens for one in counts) - accepted,
                "reasoning_tokens": 0,
            },
        }

    def _metrics(self) -> dict[str, Any]:
        """As vLLM's per-request metrics: null for several choices."""
        counts = self.choices[0].counts
        if counts is None or len(self.choices) > 1:
            return {"speculative_decoding": None}
        return {"speculative_decoding": speculation_counts(counts)}

    # --- the answer in pieces ---------------------------------------------------------------------------------------

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """One server-sent event."""
        body = self._envelope("chat.completion.chunk" if self.is_chat else "text_completion")
        body["choices"] = choices
        if self.includes_usage:
            body["usage"] = None
        return f"data: {json.dumps(body | more, separators=(',', ':'))}\n\n"

    def last_chunk(self) -> str | None:
        """Usage and counts, after the last choice is finished; None when nobody asked."""
        if not self.includes_usage:
            return None
        return self.chunk([], usage=self.usage(), **({"metrics": self._metrics()} if self.reports_counts else {}))

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Choice:
    """One completion under way."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        request: Request,
        *,
        is_chat: bool,
        echo: str = "",
        parses_tools: bool = False,
        shows_kinds: bool = False,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.counts: RequestCounts | None = None
        self._tokenizer = tokenizer
        self._text_stream = TextStream(tokenizer, request.sampling.stop)
        self._is_chat = is_chat
        self._wants_logprobs = request.sampling.logprobs is not None
        self._tools = ToolCallText() if parses_tools else None
        self._shows_kinds = shows_kinds
        self._shown: list[list[str]] = []
        """With `shows_kinds`: [text, kind] of each token of the last update."""
        self._stop_reason: int | str | None = None
        self._calls: list[ParsedCall] = []
        self._pieces: list[str] = [echo] if echo else []
        self._logprobs: list[TokenLogprobs] = []
        self._text_length = len(echo)
        self._has_begun = False
        self._echo = echo

    def take(self, update: Update) -> str:
        """Add what a round gave; returns its text. Raises ApiError for a failed request."""
        if update.error is not None:
            raise ApiError(500, update.error)
        self.num_tokens += len(update.token_ids)
        self._logprobs += update.logprobs
        text = self._new_text(update)
        if update.finish_reason is not None:
            self.finish_reason = "tool_calls" if self._calls else update.finish_reason
            self._stop_reason = update.stop_reason
            self.counts = update.counts
        return text

    def take_pieces(self, update: Update) -> list[dict[str, Any]]:
        """`take` for a stream: the pieces to send, possibly none."""
        text = self.take(update)
        pieces = []
        if not self._has_begun:
            self._has_begun = True
            if self._is_chat:
                pieces.append(self._piece({"role": "assistant", "content": ""}, ()))
            elif self._echo:
                pieces.append(self._piece(self._echo, ()))
        if text or update.logprobs or self._shown:
            piece = self._piece({"content": text} if self._is_chat else text, update.logprobs)
            kinds = {"num_drafted": update.num_drafted, "proposer": update.proposer, "tokens": self._shown}
            pieces.append(piece | {"token_kinds": kinds} if self._shows_kinds else piece)
        if update.finish_reason is not None:
            if self._calls:
                pieces.append(self._piece({"tool_calls": self._tool_calls(with_index=True)}, ()))
            last = self._piece({} if self._is_chat else "", ())
            pieces.append(last | {"finish_reason": self.finish_reason, "stop_reason": self._stop_reason})
        return pieces

    def whole(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        choice: dict[str, Any] = {"index": self.index}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            if self._calls:
                choice["message"] |= {"content": text or None, "tool_calls": self._tool_calls(with_index=False)}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs_json(self._logprobs)
        return choice | {"finish_reason": self.finish_reason, "stop_reason": self._stop_reason}

    def _new_text(self, update: Update) -> str:
        visible = text_token_ids(update.token_ids, update.finish_reason, update.stop_reason)
        if self._shows_kinds:
            self._shown = [
                [self._text_stream.push([token]), kind]
                for token, kind in zip(visible, token_kinds(update), strict=False)  # an end of sequence has no text
            ]
            text = "".join(piece for piece, _ in self._shown)
        else:
            text = self._text_stream.push(visible)
        if update.finish_reason is not None:
            rest = self._text_stream.finish()
            text += rest
            if rest and self._shows_kinds:
                self._shown.append([rest, "held"])
        if self._tools is not None:
            text = self._tools.push(text)
            if update.finish_reason is not None:
                rest, self._calls = self._tools.finish()
                text += rest
        self._pieces.append(text)
        return text

    def _piece(self, content: dict[str, Any] | str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "index": self.index,
            "delta" if self._is_chat else "text": content,
            "logprobs": self._logprobs_json(logprobs) if logprobs else None,
            "finish_reason": None,
        }

    def _tool_calls(self, *, with_index: bool) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                **({"index": index} if with_index else {}),
            }
            for index, call in enumerate(self._calls)
        ]

    def _logprobs_json(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        tokenizer = self._tokenizer
        if self._is_chat:
            rows = [
                {
                    **_token_json(tokenizer, one.token_id, one.logprob),
                    "top_logprobs": [_token_json(tokenizer, *t) for t in one.top],
                }
                for one in logprobs
            ]
            return {"content": rows, "refusal": None}
        offsets = []
        for one in logprobs:
            offsets.append(self._text_length)
            self._text_length += len(tokenizer.token_text(one.token_id))
        return {
            "tokens": [tokenizer.token_text(one.token_id) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{tokenizer.token_text(t): value for t, value in one.top} for one in logprobs],
            "text_offset": offsets,
        }


def token_kinds(update: Update) -> list[str]:
    """Where each token of a round comes from: accepted (drafted and right), recovered (drawn again after a rejection), bonus
    (free, when all drafted ones were accepted), plain (nothing was drafted); unknown where the backend does not say."""
    if update.num_drafted is None:
        return ["unknown"] * len(update.token_ids)
    if update.num_drafted == 0:
        last = "plain"
    else:
        last = "bonus" if update.num_accepted == update.num_drafted else "recovered"
    num_accepted = min(update.num_accepted, len(update.token_ids))
    return ["accepted"] * num_accepted + [last] * (len(update.token_ids) - num_accepted)


def _token_json(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token_id))}


def speculation_counts(counts: RequestCounts) -> dict[str, Any]:
    """vLLM's names."""
    drafts, drafted, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    return {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": list(counts.acceptance_histogram),
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_target_passes": counts.num_target_passes,
        "draft_version": counts.draft_version,
    }
