"""Runs promtool, and reads the rules and the metrics that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from charts.helm import CHART
from cluster.testnode import monitoring
from cluster.testnode.progress import Progress

RULES = CHART / "files/rules/sluice.yaml"
_NAME = re.compile(r"\b(sluice(?:_|:)[\w:]+)")

Rule = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Promtool:
    """The program; each call is one process."""

    program: Path

    @classmethod
    def find(cls) -> Promtool:
        """The one of the test node.

        Raises:
            Missing: it cannot be had here.
        """
        return cls(monitoring.ensure(Progress(sys.stderr)) / "promtool")

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run it and keep what it says."""
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False)


def rules() -> list[Rule]:
    """All rules of the file, in order."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[Rule]:
    """Those that are alerts."""
    return [rule for rule in rules() if "alert" in rule]


def series(expression: str) -> set[str]:
    """Names of metrics and recorded series in an expression; of a histogram its own name."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in _NAME.findall(expression)}
