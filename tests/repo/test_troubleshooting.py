"""The page for users in trouble knows every reason that the operator can give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice_operator import pods
from sluice_operator.kube import OWNED_KINDS

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / "operator/src/sluice_operator"


def reasons() -> set[str]:
    """Reasons of conditions and failures, as the code writes them."""
    found = set(pods.HINTS) | {f"{kind}Refused" for kind in OWNED_KINDS}
    for name in ("status.py", "pods.py", "reconcile.py", "changes.py"):
        text = (OPERATOR / name).read_text()
        found |= set(re.findall(r'reason="([A-Z]\w+)"', text))
        found |= set(re.findall(r'(?:_failure|engine_failure)\("([A-Z]\w+)"', text))
        found |= set(re.findall(r'return "([A-Z][a-z]+[A-Z]\w+)",', text))
    return found


@pytest.mark.parametrize("reason", sorted(reasons()))
def test_troubleshooting_explains_the_reason(reason: str) -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()

    assert f"| `{reason}` |" in page
