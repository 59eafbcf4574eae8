"""From OpenAI's JSON to the engine's records: a valid body becomes a job of one request a completion."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from livedraft.grammar import GrammarCompiler
from livedraft.records import (
    Backend,
    ContextTooLongError,
    Request,
    RouteHints,
    SamplingParams,
    UserError,
)
from livedraft.sampling import counter_key
from livedraft.server.errors import ApiError
from livedraft.server.responses import Choice, Job
from livedraft.server.schemas import ChatCompletionRequest, ChatMessage, CompletionRequest, Sampled, TextPart
from livedraft.tokenizer import Message, Tokenizer

_CHOICE_SEED = 5
"""Purpose number of the seeds of the second and later choices (lossless rule 7)."""
MakeRequest = Callable[..., Request]
_NO_HINTS = RouteHints()


@dataclass(kw_only=True)
class Served:
    """One model behind the server. `make_request(prompt, sampling, store=, tools=, id=, client=, hints=)` tokenises and
    finds the route; `learning` gives gauges."""

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
    state: Path | None = None
    """Where drafts and traces are kept; None where nothing is."""
    close: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer, self.backend.vocabulary_size)


# --- from a body to a job -------------------------------------------------------------------------------------------


def chat_job(
    body: ChatCompletionRequest, served: Served, *, id: str, reports_counts: bool, hints: RouteHints = _NO_HINTS
) -> Job:
    """Slow parts included (template, tokenising, grammar): run it off the event loop. Raises ApiError."""
    tools = [tool.model_dump() for tool in body.tools] if body.tool_choice != "none" else []
    top = (body.top_logprobs or 0) if body.logprobs else None
    messages = [_message(m) for m in body.messages]
    request = _request(body, served, messages, tools, body.max_completion_tokens, top, id, hints)
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
    return _job(
        body, served, [request], f"chatcmpl-{id}", reports_counts, is_chat=True, parses_tools=bool(tools),
        shows_kinds=body.return_token_kinds,
    )  # fmt: skip


def completion_job(
    body: CompletionRequest, served: Served, *, id: str, reports_counts: bool, hints: RouteHints = _NO_HINTS
) -> Job:
    """As `chat_job`."""
    requests, echoes = [], []
    for prompt in body.prompts:
        requests.append(_request(body, served, prompt, [], None, body.logprobs, id, hints))
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
    hints: RouteHints,
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
        request = served.make_request(
            prompt, None, store=body.store, tools=tools, id=engine_id, client=body.user or "", hints=hints
        )
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
    shows_kinds: bool = False,
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
                Choice(
                    len(choices),
                    served.tokenizer,
                    request,
                    is_chat=is_chat,
                    echo=echo,
                    parses_tools=parses_tools,
                    shows_kinds=shows_kinds,
                )
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
