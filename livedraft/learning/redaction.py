"""Asking somebody else's function what of a trace may be kept. Redaction only drops: a whole request, or its end.

Cutting out the middle would teach the draft sentences the target never said. What fails is not kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from livedraft.records import Trace, UserError

Redactor = Callable[[str, str], "int | None"]
"""(prompt, output) -> how many characters of the output may be kept; 0 drops the request, None keeps everything."""


def load_redactor(name: str) -> Redactor:
    """`module:function`. Raises UserError when there is no such function."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"learning.redact names {name!r}, which cannot be imported ({error}); check PYTHONPATH."
        ) from error
    if not callable(found):
        raise UserError(f"learning.redact names {name!r}, which is no function.")
    redactor: Redactor = found
    return redactor


def redacted(trace: Trace, redactor: Redactor, decode: Callable[[Sequence[int]], str]) -> Trace | None:
    """What may be kept of a trace; None for nothing. Raises whatever the redactor raises, and TypeError for an answer that is
    no number."""
    num_characters = redactor(decode(trace.prompt_token_ids), decode(trace.output_token_ids))
    if num_characters is None:
        return trace
    if isinstance(num_characters, bool) or not isinstance(num_characters, int):
        raise TypeError(f"the redactor answered {num_characters!r}; it must be a number of characters or None")
    num_kept = 0
    while num_kept < len(trace.output_token_ids):
        if len(decode(trace.output_token_ids[: num_kept + 1])) > num_characters:
            break
        num_kept += 1
    return cut(trace, num_kept)


def cut(trace: Trace, num_positions: int) -> Trace | None:
    """The trace up to an output position; every parallel array is cut alike."""
    if num_positions <= 0:
        return None
    is_kept_P = trace.drafted_position_P < num_positions
    changes = {}
    for field in fields(trace):
        if field.name.endswith(("_T", "_TK")) or field.name == "output_token_ids":
            changes[field.name] = getattr(trace, field.name)[:num_positions]
        elif field.name.endswith(("_P", "_PQ")):
            changes[field.name] = getattr(trace, field.name)[is_kept_P]
    return replace(trace, **changes)
