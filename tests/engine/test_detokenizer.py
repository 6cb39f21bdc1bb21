from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tiny_model import tiny_tokenizer
from sluice_engine.text.detokenizer import IncrementalDecoder

# Tokens of one byte, of two, of half a character and of none, so that every cut happens.
TOKENS = [bytes([byte]) for byte in range(256)] + [
    b"",
    b"ab",
    "é".encode(),
    "🙂".encode()[:2],
    "🙂".encode()[2:],
    b"bc",
]
token_ids = st.lists(st.integers(0, len(TOKENS) - 1), max_size=40)
few_token_ids = st.lists(st.sampled_from([*b"abc", 256, 257, 259, 260, 261, 0xC3, 0xA9]), max_size=30)
stops = st.lists(st.text(alphabet="abcé🙂", min_size=1, max_size=4), max_size=4)


def run(tokens: list[int], stop: list[str], table: list[bytes] = TOKENS) -> tuple[list[str], bool]:
    decoder = IncrementalDecoder(table, stop)
    pieces = [decoder.push(token) for token in tokens]
    return [*pieces, decoder.finish()], decoder.stopped


def reference(text: str, stop: list[str]) -> str:
    """The text up to the stop string that is complete first, letter by letter."""
    for end in range(1, len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return text[: min(starts)]
    return text


@given(token_ids)
def test_streamed_pieces_add_up_to_the_whole_text_for_any_tokens(tokens: list[int]) -> None:
    pieces, stopped = run(tokens, [])

    assert "".join(pieces) == b"".join(TOKENS[token] for token in tokens).decode("utf-8", "replace")
    assert not stopped


@given(few_token_ids, stops)
def test_the_text_ends_before_the_stop_string_wherever_tokens_are_cut(tokens: list[int], stop: list[str]) -> None:
    pieces, stopped = run(tokens, stop)
    whole = b"".join(TOKENS[token] for token in tokens).decode("utf-8", "replace")

    assert "".join(pieces) == reference(whole, stop)
    assert stopped == (reference(whole, stop) != whole or any(whole.startswith(each, len(whole)) for each in stop))


@given(few_token_ids, stops, st.integers(0, 12))
def test_a_stop_string_counts_once_there_are_as_many_tokens_as_there_must_be(
    tokens: list[int], stop: list[str], least: int
) -> None:
    at_once, late = IncrementalDecoder(TOKENS, stop), IncrementalDecoder(TOKENS, stop, min_tokens=least)
    early = "".join(late.push(token) for token in tokens[:least])
    assert not late.stopped
    said = early + "".join(late.push(token) for token in tokens[least:]) + late.finish()
    whole = b"".join(TOKENS[token] for token in tokens).decode("utf-8", "replace")

    assert whole.startswith(said)
    assert late.stopped or said == whole
    if not least:
        assert said == "".join(at_once.push(token) for token in tokens) + at_once.finish()


def test_a_stop_string_that_is_complete_too_early_is_text_and_the_next_one_ends() -> None:
    decoder = IncrementalDecoder(TOKENS, ["ab"], min_tokens=3)

    assert [decoder.push(token) for token in b"abxxab"] == ["", "ab", "x", "x", "", ""]
    assert decoder.stopped


@given(few_token_ids, stops)
def test_only_what_may_become_a_stop_string_is_held_back(tokens: list[int], stop: list[str]) -> None:
    decoder = IncrementalDecoder(TOKENS, stop)
    said = ""
    for position, token in enumerate(tokens):
        said += decoder.push(token)
        if decoder.stopped:
            break
        known = b"".join(TOKENS[each] for each in tokens[: position + 1])
        complete = known.decode("utf-8", "ignore") if known[-1:] < b"\x80" else None
        if complete is not None and "�" not in known.decode("utf-8", "replace"):
            held = complete[len(said) :]
            assert complete.startswith(said)
            assert not held or any(each.startswith(held) and each != held for each in stop)


@pytest.mark.parametrize(
    ("stop", "pushes", "pieces"),
    [
        pytest.param(["END"], ["a", "E", "N", "x"], ["a", "", "", "ENx", ""], id="a false start is given back"),
        pytest.param(["END"], ["aE", "ND", "b"], ["a", "", "", ""], id="a stop string over two tokens does not leak"),
        pytest.param(["END"], ["aEN"], ["a", "EN"], id="a held beginning is flushed at the end"),
        pytest.param(["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], id="the longest prefix alone is held"),
        pytest.param(["abc", "b"], ["a", "b"], ["", "a", ""], id="the stop string that is complete first wins"),
        pytest.param(["abc", "b"], ["abc"], ["a", ""], id="and does so in one token"),
        pytest.param(["bc", "abc"], ["abc"], ["", ""], id="of two that end together the longer one wins"),
    ],
)
def test_stop_strings(stop: list[str], pushes: list[str], pieces: list[str]) -> None:
    table = [push.encode() for push in pushes]

    assert run(list(range(len(table))), stop, table)[0] == pieces


def test_half_a_character_waits_and_is_replaced_when_nothing_follows() -> None:
    first, second = b"\xc3", b"\xa9"

    assert run([0, 1], [], [first, second])[0] == ["", "é", ""]
    assert run([0], [], [first, second])[0] == ["", "�"]


@given(st.text())
def test_a_byte_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    decoder = tokenizer.decoder()

    pieces = [decoder.push(token) for token in tokenizer.encode(text.replace("<", ""), add_special=False)]
    assert "".join(pieces) + decoder.finish() == text.replace("<", "")
