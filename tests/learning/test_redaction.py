import dataclasses
import time

import numpy as np
import pytest

from livedraft.events import Events
from livedraft.learning.capture import Capture
from livedraft.learning.redaction import cut, load_redactor, redacted
from livedraft.learning.store import TraceStore
from livedraft.records import UserError
from tests.learning.toy import served_traces


def decode(token_ids):
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


@pytest.fixture(scope="module")
def trace():
    return served_traces(1)[0]


@pytest.mark.parametrize("num_kept", [1, 5, 23, 24, 99])
def test_a_trace_is_cut_in_all_its_parallel_arrays(trace, num_kept):
    kept = cut(trace, num_kept)
    T = min(num_kept, len(trace.output_token_ids))
    assert kept.output_token_ids == trace.output_token_ids[:T]
    for field in dataclasses.fields(trace):
        if field.name.endswith(("_T", "_TK")):
            assert len(getattr(kept, field.name)) == T, field.name
    P = len(kept.drafted_position_P)
    assert int((trace.drafted_position_P < T).sum()) == P
    assert all(len(getattr(kept, f.name)) == P for f in dataclasses.fields(trace) if f.name.endswith(("_P", "_PQ")))
    assert kept.prompt_token_ids == trace.prompt_token_ids


def test_what_the_redactor_says_is_kept_and_no_token_more(trace):
    seen = []
    assert redacted(trace, lambda prompt, output: seen.append((prompt, output)), decode) is trace
    assert seen == [(decode(trace.prompt_token_ids), decode(trace.output_token_ids))]
    assert len(redacted(trace, lambda prompt, output: 7, decode).output_token_ids) == 7
    assert len(redacted(trace, lambda prompt, output: 7, lambda ids: 3 * decode(ids)).output_token_ids) == 2
    assert redacted(trace, lambda prompt, output: 0, decode) is None
    for answer in ("5", True, 2.5):
        with pytest.raises(TypeError):
            redacted(trace, lambda prompt, output, answer=answer: answer, decode)


def test_the_writer_stores_what_is_allowed_and_nothing_when_the_redactor_fails(tmp_path):
    traces = served_traces(3)

    def redact(one):
        if one.request_id == "r0":
            raise RuntimeError("no")
        return None if one.request_id == "r1" else cut(one, 4)

    events, seen = Events(), []
    events.subscribe(seen.append)
    capture = Capture(TraceStore(tmp_path), events, redact=redact)
    for one in traces:
        capture.offer(one)
    capture.close()
    store = TraceStore(tmp_path)
    (row,) = store.rows()
    assert (row.request_id, row.num_output_tokens) == ("r2", 4)
    assert [event["event"] for event in seen] == ["redaction_failed"]
    assert (capture.num_dropped, capture.num_redacted) == (1, 2)
    kept = np.array(traces[0].output_token_ids, dtype=np.int32).tobytes()
    assert not any(kept in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_redactor_is_named_as_a_function_of_a_module():
    assert load_redactor("time:sleep") is time.sleep
    for name in ("no_such_module:f", "time:no_such_function", "time:altzone"):
        with pytest.raises(UserError, match=r"learning\.redact"):
            load_redactor(name)
