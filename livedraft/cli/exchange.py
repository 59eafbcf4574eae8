"""`livedraft traces export` and `import`: traces as text or tokens for other tools, and other people's records as traces.

Formats, one JSON object a line: openai {"messages": [...]} or {"prompt": ..., "completion": ...}; sharegpt {"conversations":
[{"from": ..., "value": ...}]}; prompts {"prompt": ...}; tokens {"prompt_token_ids": [...], "output_token_ids": [...]}.
`traces` is a file of its own kind, with the target's verdicts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs
from safetensors import SafetensorError

from livedraft.bench.progress import Bar
from livedraft.cli.state import say, state_folder
from livedraft.config import EngineConfig
from livedraft.drafts.database import DATABASE_NAME
from livedraft.drafts.registry import Registry
from livedraft.engine.judging import judged_trace
from livedraft.learning.capture import conversation_key, load_secret
from livedraft.learning.store import TraceStore, read_shard, write_shard
from livedraft.llm import LLM
from livedraft.models.pull import resolve_model
from livedraft.records import DEFAULT_ROUTE, Request, SamplingParams, Trace, UserError
from livedraft.tokenizer import Message, Tokenizer, load_tokenizer

FORMATS = ("openai", "sharegpt", "prompts", "tokens", "traces")
_TRACES_PER_SHARD = 32
_ROLE_OF = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_FROM_OF = {"user": "human", "assistant": "gpt", "system": "system"}
_CHATML_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise UserError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}.")


# --- export ---------------------------------------------------------------------------------------------------------


def export_traces(state: Path | None, file: Path, *, format: str, model: str, as_json: bool) -> None:
    _check_format(format)
    store = TraceStore(state_folder(state))
    traces = [trace for row in store.rows(limit=-1) if (trace := store.read(row)) is not None]
    if not traces:
        raise UserError("There is no trace to export.")
    try:
        if format == "traces":
            _write_whole(file, lambda path: write_shard(path, traces))
            num_left_out = 0
        else:
            lines = list(
                _lines(traces, format, load_tokenizer(resolve_model(model), ()) if format != "tokens" else None)
            )
            num_left_out = len(traces) - len(lines)
            if not lines:
                raise UserError(f"No trace is a chat, and {format} holds nothing else; export with --format openai.")
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            if str(file) == "-":
                sys.stdout.write(text)
            else:
                _write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be written ({error}).") from error
    left_out = f"; {num_left_out} are no chats this format can hold and were left out" if num_left_out else ""
    num_written = len(traces) - num_left_out
    sentence = f"{num_written} traces written to {file}{left_out}."
    if as_json and str(file) != "-":
        say(sentence, as_json=True, file=str(file), num_traces=num_written)
    else:
        print(sentence, file=sys.stderr)


def _write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Under another name first: what Ctrl-C or a full disk cuts short leaves no half file. A pipe or a device is written as it
    is."""
    if file.exists() and not file.is_file():
        write(file)
        return
    partial = file.with_name(f".{file.name}.partial")
    try:
        write(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _lines(traces: list[Trace], format: str, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    for trace in traces:
        if tokenizer is None:
            yield {"prompt_token_ids": trace.prompt_token_ids, "output_token_ids": trace.output_token_ids}
            continue
        prompt = tokenizer.decode(trace.prompt_token_ids, with_special_tokens=True)
        answer = tokenizer.decode(trace.output_token_ids)
        messages = _messages(prompt, trace.prompt_token_ids, tokenizer)
        if format == "prompts":
            yield {"messages": messages} if messages else {"prompt": prompt}
        elif format == "openai" and not messages:
            ended = trace.output_token_ids[-1] in tokenizer.eos_token_ids
            yield {"prompt": prompt, "completion": answer, "finish_reason": "stop" if ended else "length"}
        elif messages:
            turns = [*messages, {"role": "assistant", "content": answer}]
            if format == "openai":
                yield {"messages": turns}
            else:
                yield {"conversations": [{"from": _FROM_OF[turn["role"]], "value": turn["content"]} for turn in turns]}


def _messages(prompt: str, prompt_token_ids: list[int], tokenizer: Tokenizer) -> list[dict[str, str]] | None:
    """The chat a prompt was made of, where the model's template gives back exactly its tokens; None otherwise."""
    messages = [{"role": role, "content": content} for role, content in _CHATML_TURN.findall(prompt)]
    if not messages or not tokenizer.has_chat_template or any(turn["role"] not in _FROM_OF for turn in messages):
        return None
    for candidate in (messages, messages[1:]):  # templates put a system message before chats that have none
        try:
            if candidate and tokenizer.encode_chat(candidate) == prompt_token_ids:
                return candidate
        except UserError:
            continue
    return None


# --- import ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a file: a prompt in some form, and the answer if it has one."""

    messages: list[Message] | None = None
    text: str | None = None
    prompt_token_ids: list[int] | None = None
    answer: str | None = None
    is_finished: bool = False
    """The answer ended by itself: end-of-sequence belongs to it."""
    output_token_ids: list[int] | None = None


def import_traces(
    state: Path | None, file: Path, *, format: str | None, limit: int | None, max_tokens: int, user: str, model: str,
    dtype: str, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    if format is not None:
        _check_format(format)
    folder = state or platformdirs.user_state_path("livedraft")
    is_shard = format == "traces" or (format is None and file.suffix == ".safetensors")
    with LLM(model, draft="none", dtype=dtype, num_threads=threads, engine=EngineConfig(num_prefix_slots=0)) as llm:
        llm.secret = load_secret(folder)
        serving = Registry(folder).in_service(DEFAULT_ROUTE) if (folder / DATABASE_NAME).exists() else None
        if serving is not None and serving.target_fingerprint != llm.target_fingerprint:
            raise UserError(f"The drafts in {folder} are for another target than {model}; name theirs with --model.")
        writer = _Writer(folder)
        if is_shard:
            for trace in _read_exported(file, limit, llm, user):
                writer.add(trace)
        else:
            _judge(read_records(file, format, limit), llm, max_tokens, user, writer)
        writer.flush()
    if not writer.num_written:
        raise UserError(
            "No record could be used." if not writer.num_known else "All of these traces are there already."
        )
    sentence = f"{writer.num_written} traces imported into {folder}; a server with learning on trains on them."
    say(sentence, as_json=as_json, num_traces=writer.num_written, num_known=writer.num_known)


class _Writer:
    """Into the store, a shard at a time: whatever ends the import early, what was judged stays."""

    def __init__(self, folder: Path) -> None:
        self._store = TraceStore(folder)
        self._known = {row.request_id for row in self._store.rows(limit=-1)}
        self._waiting: list[Trace] = []
        self.num_written = self.num_known = self.num_added = 0

    def add(self, trace: Trace) -> None:
        self.num_added += 1
        if trace.request_id in self._known:
            self.num_known += 1
            return
        self._known.add(trace.request_id)
        self._waiting.append(trace)
        if len(self._waiting) == _TRACES_PER_SHARD:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._store.append(self._waiting)
            self.num_written += len(self._waiting)
            self._waiting = []


def _read_exported(file: Path, limit: int | None, llm: LLM, user: str) -> list[Trace]:
    try:
        traces = read_shard(file)[:limit]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{file} cannot be read as exported traces ({error}).") from error
    for trace in traces:
        if trace.target_fingerprint != llm.target_fingerprint:
            raise UserError(
                f"{file} was recorded with another target ({trace.target_fingerprint}); name it with --model."
            )
    # Served by versions and known by keys of another state: here they are the user's who is named.
    return [
        replace(
            trace,
            draft_version="none",
            client_key=conversation_key([user], llm.secret),
            conversation_key=conversation_key(trace.prompt_token_ids, llm.secret),
        )
        for trace in traces
    ]


def read_records(file: Path, format: str | None, limit: int | None) -> list[Record]:
    """Raises UserError that names the line that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").split(
            "\n"
        )  # not splitlines: JSON strings may hold its other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}).") from error
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (limit is None or len(records) < limit):
            try:
                records.append(_record(line, format))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                wanted = f"the format {format}" if format else f"one of the formats {', '.join(FORMATS[:-1])}"
                raise UserError(f"Line {number} of {file} is not in {wanted} ({error}).") from error
    if not records:
        raise UserError(f"{file} holds no record.")
    return records


def _record(line: str, format: str | None) -> Record:
    if format == "prompts" and not line.lstrip().startswith("{"):
        return Record(text=line)
    fields = json.loads(line)
    for kind, key, read in _READERS:
        if key in fields and format in (None, kind):
            return read(fields)
    raise ValueError(f"found {', '.join(list(fields)[:5]) or 'nothing'}")


def _from_messages(fields: dict[str, Any]) -> Record:
    messages = [{"role": turn["role"], "content": _text(turn["content"])} for turn in fields["messages"]]
    return _from_turns(messages)


def _from_conversations(fields: dict[str, Any]) -> Record:
    return _from_turns(
        [{"role": _ROLE_OF[turn["from"]], "content": _text(turn["value"])} for turn in fields["conversations"]]
    )


def _from_turns(messages: list[dict[str, str]]) -> Record:
    """The last turn of the assistant is the answer."""
    if not any(turn["role"] == "user" for turn in messages):
        raise ValueError("no turn of the user")
    if messages[-1]["role"] == "assistant":
        return Record(messages=list(messages[:-1]), answer=messages[-1]["content"])
    return Record(messages=list(messages))


def _from_prompt(fields: dict[str, Any]) -> Record:
    answer = fields.get("completion")
    is_finished = fields.get("finish_reason") == "stop"
    return Record(
        text=_text(fields["prompt"]), answer=None if answer is None else _text(answer), is_finished=is_finished
    )


def _from_tokens(fields: dict[str, Any]) -> Record:
    prompt, output = list(fields["prompt_token_ids"]), list(fields.get("output_token_ids") or ())
    if not prompt or not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt + output):
        raise ValueError("token ids must be integers, and the prompt must have some")
    return Record(prompt_token_ids=prompt, output_token_ids=output or None)


_READERS: tuple[tuple[str, str, Callable[[dict[str, Any]], Record]], ...] = (
    ("openai", "messages", _from_messages),
    ("sharegpt", "conversations", _from_conversations),
    ("openai", "prompt", _from_prompt),
    ("tokens", "prompt_token_ids", _from_tokens),
    ("prompts", "messages", lambda fields: replace(_from_messages(fields), answer=None)),
    ("prompts", "prompt", lambda fields: replace(_from_prompt(fields), answer=None)),
    ("prompts", "turns", lambda fields: Record(messages=[{"role": "user", "content": _text(fields["turns"][0])}])),
)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text was expected")
    return value


def _judge(records: list[Record], llm: LLM, max_tokens: int, user: str, writer: _Writer) -> None:
    """Given answers in one pass each; the others are generated, all together."""
    unanswered: list[Request] = []
    num_unusable = 0
    bar = Bar()
    for number, record in enumerate(records):
        try:
            request, output = _request(record, llm, max_tokens, user, number)
            if output is None:
                llm.engine.check(request)
                unanswered.append(request)
            else:
                writer.add(judged_trace(llm.engine.runner.target, request, output, llm.target_fingerprint))
        except (ValueError, UserError):  # too long, empty, or a chat the template does not take
            num_unusable += 1
        bar("records read", number + 1, len(records))
    bar.stop()
    num_before = writer.num_added
    llm.engine.trace_sink = writer.add
    llm.add(unanswered)
    llm.run(after_round=lambda: bar("answers generated", writer.num_added - num_before, len(unanswered)))
    bar.stop()
    if num_unusable:
        print(f"{num_unusable} records do not fit the model's context or template and were left out.", file=sys.stderr)


def _request(record: Record, llm: LLM, max_tokens: int, user: str, number: int) -> tuple[Request, list[int] | None]:
    prompt: Any = record.messages if record.messages is not None else record.text
    prompt = record.prompt_token_ids if prompt is None else prompt
    if isinstance(prompt, str) and prompt.startswith(llm.tokenizer.bos_text or "\0"):
        prompt = llm.tokenizer.encode_text(prompt)  # as exported: with its special tokens written out
    sampling = SamplingParams(max_tokens=max_tokens)
    request = llm.request(prompt, sampling, client=user)
    request = replace(request, id=f"{request.id}-import{number}")
    if record.output_token_ids is not None:
        return request, record.output_token_ids
    if record.answer is None:
        return request, None
    ends = llm.tokenizer.eos_token_ids[-1:] if record.messages or record.is_finished else ()
    return request, [*llm.tokenizer.encode_text(record.answer), *ends]
