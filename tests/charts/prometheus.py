"""A real Prometheus beside a test: it scrapes what it is told to, evaluates rules, and is asked over HTTP."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

_ADDRESS = re.compile(r'msg="Listening on"(?: component=\S+)? address=(\S+)')
_POLL_S = 0.1
STARTS_WITHIN_S = 60


@dataclass(frozen=True, slots=True)
class Listening:
    """A program that serves HTTP on a port that it chose."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        """The JSON of an answer; an error of the program's own is an answer too."""
        words = f"?{urllib.parse.urlencode(query)}" if query else ""
        try:
            with urllib.request.urlopen(f"{self.url}{path}{words}", timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)


@dataclass(frozen=True, slots=True)
class Prometheus(Listening):
    """One running Prometheus."""

    def is_ready(self) -> bool:
        """Whether it answers queries: it listens before, and says 503 in plain text."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=30):
                return True
        except urllib.error.HTTPError:
            return False

    def query(self, expression: str) -> Sequence[Json]:
        """The samples of an expression now.

        Raises:
            AssertionError: Prometheus does not understand it, or cannot evaluate it.
        """
        said = self.get("/api/v1/query", query=expression)
        assert said["status"] == "success", f"{expression}: {said['error']}"
        found: Sequence[Json] = said["data"]["result"]
        return found

    def alerts(self) -> dict[str, str]:
        """State (pending, firing) of each alert by its name."""
        said = self.get("/api/v1/alerts")
        return {alert["labels"]["alertname"]: alert["state"] for alert in said["data"]["alerts"]}

    def failed_rules(self) -> list[str]:
        """Rules that could not be evaluated, with the reason."""
        groups = self.get("/api/v1/rules")["data"]["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}"
            for group in groups
            for rule in group["rules"]
            if rule.get("lastError")
        ]


@contextmanager
def listening(folder: Path, name: str, words: Sequence[object]) -> Iterator[str]:
    """Runs a program until the block ends; the URL at which it serves."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(list(map(str, words)), cwd=folder, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not (found := _ADDRESS.search(log.read_text())):
            assert process.poll() is None, f"{name} ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"{name} does not listen: {log.read_text()[-2000:]}"
            time.sleep(_POLL_S)
        yield f"http://{found[1]}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def prometheus(
    programs: Path, folder: Path, config: Mapping[str, Any], rules: Mapping[str, Any], *, address: str = "127.0.0.1:0"
) -> Iterator[Prometheus]:
    """Prometheus with that configuration and those rule groups, in a folder of the test's."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(dict(rules), width=10_000))
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({**config, "rule_files": ["rules.yaml"]}))
    words = [programs / "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
    with listening(folder, "prometheus", [*words, f"--web.listen-address={address}"]) as url:
        found = Prometheus(url)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not found.is_ready():
            assert time.monotonic() < deadline, "prometheus listens and does not get ready"
            time.sleep(_POLL_S)
        yield found
