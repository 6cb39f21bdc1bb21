"""The page for users in trouble knows every reason that the operator can give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_operator.cluster.kinds import OWNED_KINDS
from sluice_operator.observed import failures

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / "operator/src/sluice_operator"
CODE = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)+")
LINE = re.compile(CODE.pattern + ": ")


def codes(package: str) -> set[str]:
    """Codes that a program can end with, `CODE: message`: raised, returned, told, tabled, or written out."""
    files = (ROOT / package).rglob("*.py")
    return {code for path in files for code in _codes(ast.parse(path.read_text()))}


def _codes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            values = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            values = [*node.value.elts]
        elif isinstance(node, ast.Call) and any(isinstance(one, ast.Attribute) for one in node.args):
            is_failure = any(isinstance(one, ast.Attribute) and one.attr == "_failed" for one in node.args)
            values = [*node.args] if is_failure else []
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            is_table = any(isinstance(one, ast.Name) and "CODES" in one.id for one in node.targets)
            values = [*node.value.values] if is_table else []
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            values = [default for one, default in zip(arguments, node.args.defaults, strict=True) if one.arg == "code"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (said := LINE.match(node.value)):
            yield said[0].removesuffix(": ")
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and CODE.fullmatch(value.value):
                yield value.value


LAST_WORDS = codes("engine_image/src") | codes("sidecar/src")


def reasons() -> set[str]:
    """Reasons of conditions and failures, as the code writes them."""
    found = LAST_WORDS | set(failures.HINTS) | {f"{kind}Refused" for kind in OWNED_KINDS}
    for path in OPERATOR.rglob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r'reason="([A-Z]\w+)"', text))
        found |= set(re.findall(r'(?:failure)\("([A-Z]\w+)"', text))
        found |= set(re.findall(r'return "([A-Z][a-z]+[A-Z]\w+)",', text))
    return found


@pytest.mark.parametrize("reason", sorted(reasons()))
def test_troubleshooting_explains_the_reason(reason: str) -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()

    assert f"| `{reason}` |" in page


def test_the_codes_of_the_programs_are_found() -> None:
    assert {"ModelMissing", "ModelCorrupt", "SocketInUse", "SocketUnavailable", "OutOfMemory"} <= LAST_WORDS
    assert {"PortInUse", "DiskFull"} <= LAST_WORDS, "the gate's"


@pytest.mark.parametrize("code", sorted(LAST_WORDS))
def test_the_status_hints_at_a_way_out_of_each_end_of_a_program(code: str) -> None:
    assert code in failures.HINTS


@pytest.mark.parametrize("reason", sorted(set(failures.HINTS) - LAST_WORDS))
def test_a_hint_is_for_what_somebody_reports(reason: str) -> None:
    text = "".join(path.read_text() for path in OPERATOR.rglob("*.py"))

    assert text.count(f'"{reason}"') > 1, "beside its own line in HINTS"


def test_the_page_tells_of_no_failure_that_nobody_reports() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    failures = page.partition("## Conditions")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", failures, re.MULTILINE)) <= reasons()
