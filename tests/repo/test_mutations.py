"""The list of mutations keeps up with the code: `tools/mutate_core.py` itself takes minutes and is run by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate_core", ROOT / "tools/mutate_core.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate_core"] = module
    spec.loader.exec_module(module)
    return module


TOOL = load()


@pytest.mark.parametrize("mutation", TOOL.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_finds_its_text_once_and_its_tests(mutation: object) -> None:
    text = (TOOL.SOURCE / TOOL.CORE / mutation.file).read_text()  # type: ignore[attr-defined]

    assert text.count(mutation.before) == 1  # type: ignore[attr-defined]
    assert all((ROOT / path).exists() for path in mutation.tests)  # type: ignore[attr-defined]
