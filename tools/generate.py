"""Every file that is written from another one: the chart's copies, its README, the CRD's reference and its
schema for editors, the examples.

Owns the list of those files (`outputs`) and nothing else: the CRD in crds/, the chart's values.yaml and its schema are
the sources. `python tools/generate.py` writes what changed and names it; with `--check` it writes nothing, and ends
with 1 where something is out of date. Start reading at `outputs`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

from chart_page import chart_page
from chart_schema import described
from crd_page import crd_page
from editor_schema import editor_schema
from worked_example import PAGE, worked_example

ROOT = Path(__file__).resolve().parent.parent
CHART = Path("charts/sluice")
CRD = Path("crds/inferenceservices.sluice.dev.yaml")
EDITOR_SCHEMA = Path("crds/inferenceservice.schema.json")
FIRST_EXAMPLE = Path("crds/examples/demo-cpu.yaml")


def outputs(root: Path) -> dict[Path, str]:
    """Path (from the root) and contents of every generated file."""
    crd = (root / CRD).read_text()
    values = (root / CHART / "values.yaml").read_text()
    schema = json.loads((root / CHART / "values.schema.json").read_text())
    return {
        CHART / "files/crds" / CRD.name: crd,
        CHART / "files/examples" / FIRST_EXAMPLE.name: (root / FIRST_EXAMPLE).read_text(),
        CHART / "README.md": chart_page(
            yaml.safe_load((root / CHART / "Chart.yaml").read_text()),
            values,
            schema,
        ),
        CHART / "values.schema.json": described(schema, values),
        Path("docs/crd.md"): crd_page(yaml.safe_load(crd)),
        EDITOR_SCHEMA: editor_schema(yaml.safe_load(crd)),
        PAGE: worked_example(),
    }


def main() -> int:
    """Write, or check, every generated file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a file is out of date")
    arguments = parser.parse_args()
    stale = [
        path for path, text in outputs(ROOT).items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text
    ]
    for path in stale:
        if arguments.check:
            print(f"{path} is out of date: run `make crds`", file=sys.stderr)
        else:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(outputs(ROOT)[path])
            print(f"wrote {path}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
