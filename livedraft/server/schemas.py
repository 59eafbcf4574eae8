"""What clients may send: OpenAI's request bodies, with vLLM's names for what OpenAI lacks. Anything else is refused by name.

Ranges that `SamplingParams` checks are not repeated here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16
MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_FIELDS = 1024
# Lists stop at the first thing wrong: a body of a million wrong items must not become a million errors.
_TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
_StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """Unknown fields are errors; an explicit null is the same as leaving the field out, as clients write both."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for one in (data, *data.values()):
            if isinstance(one, dict) and len(one) > MAX_FIELDS and one is not data.get("schema"):
                raise ValueError(f"an object has {len(one)} fields; the limit is {MAX_FIELDS}")
        return {name: value for name, value in data.items() if value is not None}


class TextPart(Body):
    type: Literal["text"]
    text: str


_Text = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text = ""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class FunctionDefinition(Body):
    name: str = Field(min_length=1, max_length=64)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Literal[False] = False


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class JsonSchema(Body):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type json_schema, and only with it")
        return self


class Prediction(Body):
    type: Literal["content"]
    content: _Text


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampled(Body):
    """What both endpoints take."""

    model: str = Field(description="A name that GET /v1/models lists.")
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, description="0 or -1 switches it off.")
    min_p: float = 0.0
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)
    max_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    store: bool = Field(True, description="false keeps the request out of the trace store, and so out of learning.")
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
    ] = Field(default_factory=dict)
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=32,
        description="At most this many drafted tokens a round; 0 decodes plainly. Never changes the answer.",
    )

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """JSON can spell half a surrogate pair, which no tokenizer takes and no answer could echo."""
        try:
            json.dumps(data, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError("the body holds half a surrogate pair, which is not text") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        return data

    @model_validator(mode="after")
    def _options_belong(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def num_completions(self) -> int:
        """Places this takes in the queue."""
        return self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatCompletionRequest(Sampled):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] | None = None
    return_token_kinds: bool = Field(
        False, description="Each streamed piece says which tokens were accepted, recovered, bonus or plain."
    )
    parallel_tool_calls: Literal[True] = Field(True, description="Every call the model writes is returned.")

    @model_validator(mode="after")
    def _chat_options_belong(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.return_token_kinds and (not self.stream or self.tools):
            raise ValueError("return_token_kinds needs stream: true and no tools")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


_Prompts = (
    Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


class CompletionRequest(Sampled):
    prompt: str | _TokenIds | _Prompts = Field(
        description="Text, token ids, or a list of either: then n choices for each, in the prompts' order."
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: Literal[1] = 1
    max_tokens: int | None = Field(16, ge=1)

    @model_validator(mode="after")
    def _completion_options_belong(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: log-probabilities of the prompt are not computed")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def num_completions(self) -> int:
        return self.n * len(self.prompts)
