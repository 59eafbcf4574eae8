"""Text in pieces: joined pieces are the whole, and a stop string ends it wherever tokens are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from livedraft.records import UserError
from livedraft.tokenizer import TextStream, Tokenizer, load_tokenizer
from tests.hf_folder import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer())
TEXTS = ["Grüße, 日本語のテキスト", "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽", "e\u0301 n\u0303 é", "a\ufffdb", "plain", "\u200bx\n\n\ty", ""]


def pieces_of(tokenizer, token_ids, stop=(), size=1):
    stream = TextStream(tokenizer, stop)
    pieces = [stream.push(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [*pieces, stream.finish()], stream.stopped_by


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_spread_over_tokens_come_whole(text, size):
    token_ids = BYTES.encode_text(text)
    pieces, _ = pieces_of(BYTES, token_ids, size=size)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_characters_spread_over_tokens_come_whole_with_a_real_vocabulary(smollm2, text):
    token_ids = smollm2.encode_text(text)
    pieces, _ = pieces_of(smollm2, token_ids)
    assert "".join(pieces) == text
    assert b"".join(smollm2.token_bytes(token) for token in token_ids).decode() == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=30), st.integers(1, 5))
def test_any_tokens_give_the_whole_text_in_pieces(token_ids, size):
    """Invalid bytes, special tokens and half characters included."""
    pieces, _ = pieces_of(BYTES, token_ids, size=size)
    assert "".join(pieces) == BYTES.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(st.text("abé日", max_size=20), st.lists(st.text("abé日", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_stop_string_cuts_before_it_and_is_never_shown_in_part(text, stop):
    token_ids = BYTES.encode_text(text)
    pieces, stopped_by = pieces_of(BYTES, token_ids, stop)
    found = [text.find(one) for one in stop if one in text]
    if not found:
        assert ("".join(pieces), stopped_by) == (text, None)
        return
    # The stop string that is complete first ends it; among those complete at once the leftmost.
    end = min(text.find(one) + len(one) for one in stop if one in text)
    start = min(text[:end].find(one) for one in stop if one in text[:end])
    assert stopped_by in stop
    assert "".join(pieces) == text[:start]
    assert all(text.startswith("".join(pieces[: n + 1])) for n in range(len(pieces)))


def test_text_that_may_begin_a_stop_string_is_held_back_and_given_out_at_the_end():
    stream = TextStream(BYTES, ["</end>"])
    assert stream.push(BYTES.encode_text("x</en")) == "x"
    assert stream.finish() == "</en"


def test_a_stop_string_in_text_held_back_at_the_end_counts():
    tokens = [*BYTES.encode_text("hi "), BYTES.encode_text("é")[0]]
    stream = TextStream(BYTES, [" \ufffd"])
    assert stream.push(tokens) + stream.finish() == "hi"
    assert stream.stopped_by == " \ufffd"


def test_special_tokens_between_the_bytes_of_a_character_break_nothing_and_cost_nothing():
    import time

    first, second = BYTES.encode_text("é")
    stream = TextStream(BYTES)
    started = time.perf_counter()
    assert stream.push([257] * 20_000 + [first] + [256] * 100 + [second]) == "é"
    assert time.perf_counter() - started < 1


def test_garbage_is_not_held_back_for_ever():
    stream = TextStream(BYTES)
    lone_byte = BYTES.encode_text("é")[1]
    pushed = [stream.push([lone_byte]) for _ in range(200)]
    assert sum(map(len, pushed)) > 100
    assert len("".join(pushed) + stream.finish()) == 200


def test_template_errors_and_missing_templates_are_one_sentence():
    hf = byte_tokenizer()
    hf.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        Tokenizer(hf).encode_chat([{"role": "user", "content": "a"}])
    hf.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        Tokenizer(hf).encode_chat([{"role": "user", "content": "a"}])


def test_tools_reach_the_template_that_takes_them_and_are_refused_otherwise():
    tools = [{"type": "function", "function": {"name": "find"}}]
    with pytest.raises(UserError, match="takes no tools"):
        BYTES.encode_chat([{"role": "user", "content": "a"}], tools)
    hf = byte_tokenizer()
    hf.chat_template = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}"
    taking = Tokenizer(hf)
    assert taking.decode(taking.encode_chat([{"role": "user", "content": "a"}], tools)) == "finda"
