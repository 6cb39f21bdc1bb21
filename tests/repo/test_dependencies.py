"""What a part declares it needs, it imports: an image holds nothing that nobody uses."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORTED_AS = {"pyyaml": "yaml"}


def declared(part: str) -> set[str]:
    project = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^A-Za-z0-9-]", requirement)[0].lower() for requirement in project["dependencies"]]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def imported(part: str) -> set[str]:
    found: set[str] = set()
    for path in (ROOT / part / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("part", ["engine_image", "sidecar", "operator", "simulator"])
def test_a_part_imports_what_it_declares(part: str) -> None:
    assert declared(part) - imported(part) == set()
