"""Runs the helm program on the chart: what it renders, and what it says when it refuses.

Owns nothing but the command line. `find` gives the pinned program of the test node, built once where Go is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.testnode import programs
from cluster.testnode.errors import Missing
from cluster.testnode.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/sluice"


def find() -> str:
    """Path of helm: the pinned one, else the one in PATH.

    Raises:
        Missing: there is none, and none can be built.
    """
    module = next(module for module in programs.ALL if module.name == "helm")
    try:
        return str(programs.ensure(Progress(sys.stderr), module) / "helm")
    except Missing:
        found = shutil.which("helm")
        if found is None:
            raise
        return found


@dataclass(frozen=True, slots=True)
class Helm:
    """The program; each call is one process."""

    program: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run helm without the user's own settings."""
        environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False, env=environment)

    def template(self, *arguments: str) -> str:
        """What `helm template` renders, as text."""
        done = self.run("template", "sluice", str(CHART), "--namespace", "sluice-system", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *arguments: str) -> list[dict[str, Any]]:
        """What `helm template` renders, as objects."""
        return [document for document in yaml.safe_load_all(self.template(*arguments)) if document]

    def refusal(self, *arguments: str) -> str:
        """What helm says when it refuses the values."""
        done = self.run("template", "sluice", str(CHART), *arguments)
        assert done.returncode != 0, "helm accepted the values"
        return done.stderr
