"""Files that are written from others are as their sources would have them now."""

from __future__ import annotations

import subprocess
import sys

import yaml

from charts.helm import CHART, ROOT

CRD = ROOT / "crds/inferenceservices.sluice.dev.yaml"


def test_every_generated_file_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/generate.py", "--check"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_the_chart_carries_the_definition_byte_for_byte() -> None:
    assert (CHART / "files/crds" / CRD.name).read_bytes() == CRD.read_bytes()


def fields(schema: dict[str, object], path: str) -> list[str]:
    """Dotted paths of every field that the schema names."""
    found = []
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    for name, field in properties.items():
        item = field.get("items", field)
        found += [f"{path}.{name}", *fields(item, f"{path}.{name}" + ("[]" if item is not field else ""))]
    return found


def test_the_reference_has_a_row_for_every_field_that_ends_in_a_sentence() -> None:
    version = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    page = (ROOT / "docs/crd.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]

    for top in ("spec", "status"):
        for path in fields(schema["properties"][top], top):
            name = path.rsplit(".", 1)[1].removesuffix("[]")
            mine = [row for row in rows if row.startswith(f"| `{name}` |")]
            assert mine, path
            assert all(row.endswith(". |") for row in mine), path


def test_the_chart_is_versioned_with_the_operator() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "operator/pyproject.toml").read_text()

    assert f'version = "{chart["appVersion"]}"' in project
