"""Between OpenAI's JSON and the engine's records: a body becomes requests, updates become response objects or stream chunks.

One `Choice` a requested completion assembles text and log-probabilities the same way for both, so joined stream pieces equal
the whole.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from livedraft.grammar import GrammarCompiler
from livedraft.records import (
    Backend,
    ContextTooLongError,
    Request,
    RequestCounts,
    SamplingParams,
    TokenLogprobs,
    Update,
    UserError,
    text_token_ids,
)
from livedraft.sampling import counter_key
from livedraft.server.errors import ApiError
from livedraft.server.schemas import ChatCompletionRequest, ChatMessage, CompletionRequest, Sampled, TextPart
from livedraft.server.tool_calls import ParsedCall, ToolCallText
from livedraft.tokenizer import Message, TextStream, Tokenizer

_CHOICE_SEED = 5
"""Purpose number of the seeds of the second and later choices (lossless rule 7)."""
MakeRequest = Callable[..., Request]


@dataclass(kw_only=True)
class Served:
    """One model behind the server. `make_request(prompt, sampling, store=, tools=, id=, client=)` tokenises; `learning` gives
    gauges."""

    name: str
    backend: Backend
    tokenizer: Tokenizer
    make_request: MakeRequest
    fingerprint: str = ""
    max_num_seqs: int = 16
    draft_name: str = ""
    """Label of the draft in metrics."""
    created: int = field(default_factory=lambda: int(time.time()))
    learning: Callable[[], dict[str, float]] = dict
    banner: Sequence[tuple[str, str]] = ()
    close: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.backend.vocabulary_size)


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
        if text or update.logprobs:
            pieces.append(self._piece({"content": text} if self._is_chat else text, update.logprobs))
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
        text = self._text_stream.push(text_token_ids(update.token_ids, update.finish_reason, update.stop_reason))
        if update.finish_reason is not None:
            text += self._text_stream.finish()
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


# --- from a body to a job -------------------------------------------------------------------------------------------


def chat_job(body: ChatCompletionRequest, served: Served, *, id: str, reports_counts: bool) -> Job:
    """Slow parts included (template, tokenising, grammar): run it off the event loop. Raises ApiError."""
    tools = [tool.model_dump() for tool in body.tools] if body.tool_choice != "none" else []
    top = (body.top_logprobs or 0) if body.logprobs else None
    request = _request(body, served, [_message(m) for m in body.messages], tools, body.max_completion_tokens, top, id)
    if body.prediction is not None:
        text = _text(body.prediction.content)
        _refuse_too_long(text, served)
        predicted = served.tokenizer.encode_text(text)
        request = replace(request, prediction_token_ids=tuple(predicted))
    if body.response_format is not None and body.response_format.type != "text":
        if tools:
            raise ApiError(
                400, "response_format and tools exclude each other; give one of them.", param="response_format"
            )
        schema = body.response_format.json_schema
        try:
            grammar = served.grammars.compile(schema.schema_ if schema else {"type": "object"})
        except UserError as error:
            raise ApiError(400, str(error), param="response_format") from error
        request = replace(request, grammar=grammar)
    return _job(body, served, [request], f"chatcmpl-{id}", reports_counts, is_chat=True, parses_tools=bool(tools))


def completion_job(body: CompletionRequest, served: Served, *, id: str, reports_counts: bool) -> Job:
    """As `chat_job`."""
    requests, echoes = [], []
    for prompt in body.prompts:
        requests.append(_request(body, served, prompt, [], None, body.logprobs, id))
        text = prompt if isinstance(prompt, str) or not body.echo else served.tokenizer.decode(prompt)
        echoes.append(str(text) if body.echo else "")
    return _job(body, served, requests, f"cmpl-{id}", reports_counts, is_chat=False, echoes=echoes)


def _request(
    body: Sampled,
    served: Served,
    prompt: Any,
    tools: list[dict[str, Any]],
    max_completion_tokens: int | None,
    logprobs: int | None,
    id: str,
) -> Request:
    if isinstance(prompt, str):
        _refuse_too_long(prompt, served)
    elif prompt and isinstance(prompt[0], dict):
        _refuse_too_long("".join(message["content"] for message in prompt), served)
    if body.model != served.name:
        raise ApiError(
            404,
            f"There is no model {body.model!r} here; this server has {served.name!r}.",
            param="model",
            code="model_not_found",
        )
    try:
        engine_id = f"{id}-{uuid.uuid4().hex[:8]}"  # clients may send one id twice
        request = served.make_request(prompt, None, store=body.store, tools=tools, id=engine_id, client=body.user or "")
    except UserError as error:
        raise ApiError(400, str(error), param="tools" if "tools" in str(error) else "messages") from error
    num_left = served.backend.max_model_len - len(request.prompt_token_ids)
    max_tokens = max_completion_tokens or body.max_tokens or max(1, num_left)
    try:
        request = replace(request, sampling=_sampling(body, max_tokens, logprobs))
        served.backend.check(request)
    except ContextTooLongError as error:
        raise ApiError(400, str(error), param="max_tokens", code="context_length_exceeded") from error
    except ValueError as error:
        raise ApiError(400, str(error), param=_named_field(str(error)), code="invalid_value") from error
    return replace(request, num_speculative_tokens=body.num_speculative_tokens)


def _refuse_too_long(text: str, served: Served) -> None:
    """Before tokenising: megabytes that cannot fit are not worth seconds. No token is longer than the longest one."""
    most = served.backend.max_model_len * served.tokenizer.longest_token_bytes
    if len(text) > most:
        raise ApiError(
            400,
            f"The text has {len(text)} characters and cannot fit {served.backend.max_model_len} tokens.",
            param="prompt",
            code="context_length_exceeded",
        )


def _sampling(body: Sampled, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Raises ValueError with a sentence that names the field."""
    bias = []
    for key, addend in body.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
            raise ValueError(f"logit_bias maps token ids to numbers, and {key[:20]!r} is no token id.")
        bias.append((int(key), addend))
    return SamplingParams(
        temperature=body.temperature,
        top_k=max(0, body.top_k) if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed % 2**63,
        max_tokens=max_tokens,
        stop=body.stop_strings,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(bias),
        logprobs=logprobs,
    )


def _job(
    body: Sampled,
    served: Served,
    prompts: list[Request],
    id: str,
    reports_counts: bool,
    *,
    is_chat: bool,
    echoes: Sequence[str] = ("",),
    parses_tools: bool = False,
) -> Job:
    """n choices for each prompt. Raises ApiError when the backend refuses one."""
    requests: list[Request] = []
    choices: list[Choice] = []
    for prompt, echo in zip(prompts, echoes, strict=True):
        try:
            served.backend.check(prompt)
        except ContextTooLongError as error:
            raise ApiError(400, str(error), param="max_tokens", code="context_length_exceeded") from error
        except ValueError as error:
            raise ApiError(400, str(error), param=_named_field(str(error)), code="invalid_value") from error
        for index in range(body.n):
            request = _for_choice(prompt, index)
            choices.append(
                Choice(len(choices), served.tokenizer, request, is_chat=is_chat, echo=echo, parses_tools=parses_tools)
            )
            requests.append(request)
    return Job(
        id=id,
        model=served.name,
        is_chat=is_chat,
        requests=requests,
        choices=choices,
        num_choices=body.n,
        num_prompt_tokens=sum(len(prompt.prompt_token_ids) for prompt in prompts),
        is_stream=body.stream,
        includes_usage=body.stream_options is not None and body.stream_options.include_usage,
        reports_counts=reports_counts,
        metadata=body.metadata,
        fingerprint=served.fingerprint,
    )


def _for_choice(request: Request, index: int) -> Request:
    """The same request under its own id, seed and grammar state."""
    if index == 0:
        return request
    seed = request.sampling.seed
    sampling = request.sampling
    if seed is not None:
        sampling = replace(sampling, seed=counter_key(seed, index, _CHOICE_SEED) >> 1)
    grammar = request.grammar and request.grammar.copy()
    return replace(request, id=f"{request.id}-{index}", sampling=sampling, grammar=grammar)


def _message(message: ChatMessage) -> Message:
    """As chat templates expect it: text only, and nothing the client left out."""
    plain = message.model_dump(exclude_none=True, exclude_defaults=True) | {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content),
    }
    for call in plain.get("tool_calls", []):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # templates take the text as it is, too
    return plain


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _named_field(sentence: str) -> str | None:
    """Our sentences begin with the field they are about."""
    word = sentence.split(" ", 1)[0].strip(":,.")
    return word if word.isidentifier() and word.islower() else None
