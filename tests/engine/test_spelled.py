"""Special tokens that a caller spells out are found wherever they stand, and what is cut there is the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.text.spelled import marked, spelled_pattern

texts = st.text(alphabet="ab<|]", max_size=12)


@given(st.lists(st.text(alphabet="ab<|]", max_size=4), max_size=6), texts)
def test_each_is_found_at_its_first_letter(specials: list[str], text: str) -> None:
    pattern = spelled_pattern(specials)
    found = [] if pattern is None else [match.start() for match in pattern.finditer(text)]

    longer = [special for special in specials if len(special) > 1]
    assert found == [at for at in range(len(text)) if any(text.startswith(special, at) for special in longer)]


@given(st.lists(st.text(alphabet="ab<|]", min_size=2, max_size=4), min_size=1, max_size=6), texts, texts)
def test_no_piece_has_one_and_together_they_are_the_text(specials: list[str], text: str, other: str) -> None:
    (told, others), mark = marked((text, {other: [other]}), spelled_pattern(specials))

    pieces = [text] if mark is None else told.split(mark)
    assert "".join(pieces) == text
    assert not any(special in piece for special in specials for piece in pieces)
    if mark is not None:
        ((name, (value,)),) = others.items()
        assert name == value
        assert name.replace(mark, "") == other


def test_none_are_none() -> None:
    assert spelled_pattern(["", "x"]) is None
    assert marked(["<s>"], None) == (["<s>"], None)


def test_a_thousand_special_tokens_are_looked_for_at_once() -> None:
    pattern = spelled_pattern([f"[control_{index}]" for index in range(1000)])
    assert pattern is not None
    assert len(pattern.pattern) < 5000, "each beginning that they share is there once"
    assert [found.start() for found in pattern.finditer("[control_7][control_1000][control_77]")] == [0, 25]


@pytest.mark.parametrize("value", [1, None, True, [1, None], {"a": 2.5}])
def test_what_is_no_text_stays(value: object) -> None:
    said, mark = marked([value, "<s>"], spelled_pattern(["<s>"]))
    assert mark is not None
    assert said == [value, f"<{mark}s>"]
