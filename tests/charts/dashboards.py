"""The dashboards as data: every expression that Grafana would send, with its variables filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from charts.helm import CHART

FILES = sorted((CHART / "files/dashboards").glob("*.json"))
_VARIABLE = re.compile(r"\$(__rate_interval|\w+)")


def load(name: str) -> dict[str, Any]:
    """One dashboard by its file's name."""
    found: dict[str, Any] = json.loads((CHART / f"files/dashboards/{name}.json").read_text())
    return found


def panels(name: str) -> Iterator[dict[str, Any]]:
    """Its panels, the rows between them left out."""
    return (panel for panel in load(name)["panels"] if panel["type"] != "row")


def filled(expression: str, interval: str) -> str:
    """An expression as Grafana sends it with everything selected."""
    return _VARIABLE.sub(lambda found: interval if found[1] == "__rate_interval" else ".*", expression)


def expressions(name: str) -> dict[str, str]:
    """Expression by where it stands: each panel's, each variable's and each annotation's."""
    board = load(name)
    found = {
        f"{panel['title']} {target['refId']}": target["expr"] for panel in panels(name) for target in panel["targets"]
    }
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert inner, variable["name"]
            found[f"variable {variable['name']}"] = f"count by ({inner[2]}) ({inner[1]})"
    return found
