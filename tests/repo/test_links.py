"""Every relative link in the documentation leads somewhere, and every make target it names exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from sluice_sidecar.errors import Reason, Refusal

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / name
    for name in subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    .stdout.strip()
    .split("\n")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`]*`", "", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))

    assert named <= targets


def test_every_refusal_of_the_gate_has_its_row_in_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()

    for reason in Reason:
        status = Refusal(reason, "").status
        assert f"| `{reason.value}` | {status} |" in page


def test_the_readme_shows_the_example_that_it_runs() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = yaml.safe_load((ROOT / "crds/examples/demo-cpu.yaml").read_text())
    written = yaml.safe_load(shown)

    assert written["metadata"] == example["metadata"]
    assert all(example["spec"][field] == value for field, value in written["spec"].items())
