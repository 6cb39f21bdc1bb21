"""Runs kubectl beside the node: what it prints, what it refuses, and waiting for what is to become true."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

# Two cores run a whole node, the programs under test and the tests: nothing here is timed, and nothing hangs for ever.
PATIENCE = "300s"


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The program, bound to a namespace."""

    namespace: str

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """One call, whatever comes of it."""
        argv = ["kubectl", "--namespace", self.namespace, *words]
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)

    def __call__(self, *words: str, stdin: str | None = None) -> str:
        """What a call prints that has to succeed."""
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def apply(self, *manifests: Mapping[str, Any]) -> str:
        """Apply manifests as a user does."""
        return self("apply", "-f", "-", stdin=_as_list(manifests))

    def refusal(self, manifest: Mapping[str, Any]) -> str:
        """What `kubectl apply` says when the API server refuses."""
        done = self.run("apply", "-f", "-", stdin=json.dumps(manifest))
        assert done.returncode != 0, f"it was accepted: {done.stdout}"
        return done.stderr

    def get(self, kind: str, name: str) -> Object:
        """One object."""
        found: Object = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def all_of(self, kinds: str, *words: str) -> list[Object]:
        """All objects of some kinds."""
        items: list[Object] = json.loads(self("get", kinds, *words, "-o", "json"))["items"]
        return items

    def wait(self, what: str, until: str, *words: str) -> None:
        """Return when it is so: `kubectl wait`'s own words, such as condition=Ready or delete."""
        self("wait", what, f"--for={until}", f"--timeout={PATIENCE}", *words)


def _as_list(manifests: tuple[Mapping[str, Any], ...]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
