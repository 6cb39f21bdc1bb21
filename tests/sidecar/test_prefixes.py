"""Which beginnings of prompts are known, what they are credited with, and what becomes of a wrong credit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sidecar.capacity.prefixes import CHUNK_BYTES, MOST_KEYS, Beginning, Match, Prefixes

BLOCK = 16
PLENTY = 10**9


def text(chunks: int, fill: str = "x") -> bytes:
    return fill.encode() * chunks * CHUNK_BYTES


def known(*texts: bytes, tokens_per_chunk: int = 64, pool_tokens: int = PLENTY) -> Prefixes:
    prefixes = Prefixes()
    for one in texts:
        beginning = Beginning("a", one)
        prefixes.computed(beginning, len(one) * tokens_per_chunk // CHUNK_BYTES, pool_tokens)
    return prefixes


def matched(prefixes: Prefixes, one: bytes, tenant: str = "a") -> Match:
    return prefixes.match(Beginning(tenant, one))


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        pytest.param(text(4), 256, id="the-same-again"),
        pytest.param(text(4) + b"more", 256, id="a-conversation-that-went-on-is-known-as-far-as-it-was-computed"),
        pytest.param(text(2) + text(2, "y"), 128, id="two-that-part-share-what-is-before"),
        pytest.param(b"y" + text(4), 0, id="another-beginning-is-another-prompt"),
        pytest.param(text(1)[:-1], 0, id="too-short-to-have-a-key"),
        pytest.param(b"", 0, id="nothing"),
    ],
)
def test_a_prompt_is_known_as_far_as_one_like_it_was_computed(asked: bytes, tokens: int) -> None:
    assert matched(known(text(4)), asked).tokens == tokens


def test_no_tenant_is_credited_with_what_another_computed() -> None:
    assert matched(known(text(4)), text(4), "b").tokens == 0


def test_equal_keys_mean_an_equal_beginning() -> None:
    prefixes = known(text(4), text(2) + text(3, "y"))

    a, b = matched(prefixes, text(4) + b"1"), matched(prefixes, text(4) + b"2")
    c = matched(prefixes, text(2) + text(3, "y"))

    assert a.key == b.key != c.key
    assert a.key


@pytest.mark.parametrize(
    ("prompt_tokens", "credit"),
    [
        pytest.param(400, 256, id="whole-blocks-of-what-was-computed"),
        pytest.param(256, 240, id="the-last-token-is-always-computed"),
        pytest.param(100, 96, id="never-more-than-the-prompt-has"),
        pytest.param(1, 0, id="a-single-token"),
    ],
)
def test_credit(prompt_tokens: int, credit: int) -> None:
    prefixes = known(text(4))

    assert prefixes.credit(matched(prefixes, text(4)), prompt_tokens, BLOCK) == credit


def test_a_credit_that_was_wrong_is_discounted_and_comes_back_when_it_is_right() -> None:
    prefixes = known(text(4))
    match = matched(prefixes, text(4))
    for _ in range(60):
        prefixes.judge(256, 0)
    assert prefixes.credit(match, 400, BLOCK) == 0

    for _ in range(60):
        prefixes.judge(256, 256)

    assert prefixes.credit(match, 400, BLOCK) >= 240
    assert (prefixes.credited_tokens_total, prefixes.found_tokens_total) == (120 * 256, 60 * 256)


def test_finding_more_than_was_credited_is_no_reason_to_credit_more() -> None:
    prefixes = known(text(4))
    prefixes.judge(100, 5000)

    assert prefixes.share == 1.0


def test_a_pool_that_can_hold_no_more_forgets_the_oldest_and_of_a_prompt_its_end_first() -> None:
    prefixes = known(text(4, "a"), text(4, "b"), text(2, "c"), pool_tokens=8 * 64)

    assert matched(prefixes, text(4, "a")).tokens == 128, "its first half is still there"
    assert matched(prefixes, text(4, "b")).tokens == 256
    assert matched(prefixes, text(2, "c")).tokens == 128


def test_what_is_computed_again_is_young_again() -> None:
    prefixes = known(text(4, "a"), text(4, "b"), text(4, "a"), text(4, "c"), pool_tokens=8 * 64)

    assert matched(prefixes, text(4, "a")).tokens == 256
    assert matched(prefixes, text(4, "b")).tokens == 0


def test_an_engine_that_began_anew_has_computed_nothing() -> None:
    prefixes = known(text(4))
    prefixes.forget()

    assert matched(prefixes, text(4)).tokens == 0


def test_the_text_is_not_kept_once_all_keys_are_made() -> None:
    beginning, other = Beginning("a", text(3)), Beginning("a", text(3))
    beginning.settle()

    assert beginning._text == b""
    assert [beginning.key(i) for i in range(3)] == [other.key(i) for i in range(3)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.integers(1, 40)), max_size=30),
    st.text("ab", max_size=6),
    st.integers(0, 400),
)
def test_never_more_is_credited_than_was_computed_and_the_bounds_hold(
    computed: list[tuple[str, int]], asked: str, pool_tokens: int
) -> None:
    def prompt(name: str) -> bytes:
        return b"".join(text(1, letter) for letter in name)

    prefixes = Prefixes()
    for name, tokens in computed:
        prefixes.computed(Beginning("a", prompt(name)), tokens, pool_tokens)
    match = matched(prefixes, prompt(asked))

    depth = match.num_bytes // CHUNK_BYTES
    seen = [tokens * depth // len(name) for name, tokens in computed if name and name.startswith(asked[:depth])]
    assert match.tokens <= min(pool_tokens, max(seen, default=0))
    assert prefixes._held_tokens == sum(chunk for _, chunk in prefixes._tokens.values()) <= max(0, pool_tokens)
    assert len(prefixes._tokens) <= MOST_KEYS
