"""Sizes in words."""

from __future__ import annotations

import pytest

from sluice_engine.sizes import bytes_in_words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0.0 MB"), (1_540_000, "1.5 MB"), (99_999_999, "100.0 MB"), (100_000_000, "0.1 GB"), (16 * 10**9, "16.0 GB")],
)
def test_a_size_is_told_in_the_unit_that_a_person_would_take(count: int, words: str) -> None:
    assert bytes_in_words(count) == words
