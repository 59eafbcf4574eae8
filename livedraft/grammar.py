"""Output that follows a JSON schema: llguidance's matcher behind the `Grammar` record (extra `structured`)."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from livedraft.records import Grammar, UserError
from livedraft.tokenizer import Tokenizer

_MAX_SCHEMA_CHARACTERS = 64_000
# As json.dumps writes it: free whitespace invites small models to write nothing else.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LARGEST_MULTIPLE = 10_000
_LIMITS: Any = {
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class GrammarError(RuntimeError):
    """The matcher gave up on this output; the request fails, others do not notice."""


class JsonGrammar:
    """One request's matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed_tokens(self) -> np.ndarray:
        mask = self._matcher.compute_bitmask()
        self._require_sound()
        return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little").astype(bool)

    def advance(self, token_id: int) -> bool:
        is_taken = bool(self._matcher.try_consume_tokens([token_id]) == 1)
        self._require_sound()
        return is_taken

    def retreat(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            # Its message may quote the schema and the output, which belong in no log.
            raise GrammarError(f"the grammar gave up ({self._matcher.stop_reason()})")

    def copy(self) -> JsonGrammar:
        return JsonGrammar(self._matcher.deep_copy())


class GrammarCompiler:
    """Makes grammars for one tokenizer. Slow (a second for the first one): call it off the engine's thread."""

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._ll_tokenizer: Any = None
        self._lock = threading.Lock()

    def compile(self, schema: dict[str, Any] | bool) -> Grammar:
        """A grammar for JSON that fits `schema` ({} is any object). Raises UserError for a schema it cannot read."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise UserError(
                "response_format needs llguidance; install it with: pip install 'livedraft[structured]'."
            ) from error
        text = json.dumps(schema)
        _refuse_bombs(schema)
        if len(text) > _MAX_SCHEMA_CHARACTERS:
            raise UserError(f"The schema has {len(text)} characters; the limit is {_MAX_SCHEMA_CHARACTERS}.")
        with self._lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = llguidance.hf.from_tokenizer(
                    self._tokenizer.hf_tokenizer,
                    n_vocab=self._vocabulary_size,
                    eos_token=list(self._tokenizer.eos_token_ids),
                )
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, _LAYOUT)
            limits = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise UserError(f"The schema cannot be read: {_first_line(error)}.") from error
        if matcher.is_error():
            raise UserError(f"The schema cannot be read: {_first_line(matcher.get_error())}.")
        compiled = JsonGrammar(matcher)
        try:
            compiled.allowed_tokens()  # some schemas are read and then allow nothing at all
        except GrammarError as error:
            raise UserError(f"The schema cannot be followed: {error}.") from error
        return compiled


def _refuse_bombs(schema: Any) -> None:
    """`multipleOf` becomes an automaton with as many states as the number: a large one is minutes and gigabytes."""
    found = [schema]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            multiple = one.get("multipleOf")
            if isinstance(multiple, (int, float)) and not 1e-4 <= abs(multiple) <= _LARGEST_MULTIPLE:
                raise UserError(f"The schema's multipleOf must lie in [0.0001, {_LARGEST_MULTIPLE}].")
        if isinstance(one, (dict, list)):
            found += one.values() if isinstance(one, dict) else one


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["unknown"])[0].rstrip(".")
