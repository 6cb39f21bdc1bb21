"""The definition while services run: another schema for it, and an operator that has surely read a service by it."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.service.release import CHART
from cluster.service.space import KIND, Space, example
from cluster.testnode.cluster import Cluster, Object

_FILE = "files/crds/inferenceservices.sluice.dev.yaml"


def of_chart(chart: Path = CHART) -> Object:
    """The schema that a chart brings, by default today's."""
    return _schema_of(yaml.safe_load((chart / _FILE).read_text()))


def of_node(node: Cluster) -> Object:
    """The schema that the API server has now."""
    return _schema_of(node.get("customresourcedefinition", KIND))


def fields(schema: Object) -> Object:
    """What it allows under `spec`."""
    found: Object = schema["properties"]["spec"]["properties"]
    return found


def chart_with(schema: Object, folder: Path, chart: Path = CHART) -> Path:
    """The chart with another schema in its definition and nothing else changed: what an upgrade has sent first."""
    made = Path(shutil.copytree(chart, folder / "chart"))
    definition = yaml.safe_load((made / _FILE).read_text())
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = schema
    (made / _FILE).write_text(yaml.safe_dump(definition, sort_keys=False))
    return made


def filling_in(wanted: Object, added: dict[str, Any]) -> Object:
    """The schema with further defaults: paths below `spec` ("" is `spec` itself), and the fields each fills in.

    A field that is there keeps its schema, and has the default besides; another one is new.
    """
    later = copy.deepcopy(wanted)
    for path, filled in added.items():
        node = later["properties"]["spec"]
        for step in path.split(".") if path else ():
            node = node["items"] if step == "[]" else node["properties"][step]
        for name, default in filled.items():
            known = node["properties"].get(name, {"type": "string", "description": "Of a later definition."})
            node["properties"][name] = {**known, "default": default}
    return later


@dataclass(slots=True)
class Look:
    """Makes whichever operator acts look at a service, as the API server has it at that time."""

    space: Space
    _number: Iterator[int] = field(default_factory=itertools.count)

    def at(self, name: str) -> None:
        """Returns once it did."""
        space, number = self.space, next(self._number)
        # Nobody's spec changes, and the watch brings the whole resource.
        space.kubectl("annotate", KIND, name, f"sluice.test/looked-at={number}", "--overwrite")
        # What is told of a service that came later was read after that.
        later = copy.deepcopy(example("minimal"))
        later["metadata"]["name"] = f"{name}-later-{number}"
        later["spec"]["replicas"] = 0
        space.apply(later)
        space.wait_for(f"{KIND}/{later['metadata']['name']}", "jsonpath={.status.observedGeneration}=1")
        space.kubectl("delete", KIND, later["metadata"]["name"])
        # Whoever brings this back has rendered the service anew.
        gone = self._account(name)
        space.kubectl("delete", "serviceaccount", name)
        space.node.wait_for("its account to be made anew", lambda: self._account(name) != gone)

    def _account(self, name: str) -> str:
        uid: str = self.space.get("serviceaccount", name)["metadata"]["uid"]
        return uid


def _schema_of(definition: Object) -> Object:
    (version,) = definition["spec"]["versions"]
    found: Object = version["schema"]["openAPIV3Schema"]
    return found
