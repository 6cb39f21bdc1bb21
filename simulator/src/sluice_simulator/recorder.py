"""`sluice record`: watches a running pod, and writes down what `sluice simulate --from` needs.

Owns the polling of an admin port and the merging of what it says: the rings there are bounded, so a long record is made
of many looks. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from sluice_engine import codec
from sluice_engine.errors import EngineError
from sluice_engine.table_file import read_step_table
from sluice_operator.errors import InvalidManifest
from sluice_operator.resource import manifest
from sluice_operator.resource.units import parse_duration_us
from sluice_simulator.errors import InvalidInput
from sluice_simulator.record import SCHEMA

_MOST_STEPS = 4096
_LOOK_EVERY_S = 1.0
_TIMEOUT_S = 20.0


class Watch:
    """All that an admin port has said so far."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.table: dict[str, Any] | None = None
        """The step times that the engine began with."""
        self.learned: dict[str, Any] | None = None
        """Those that it has learned by now."""
        self._steps: dict[int, dict[str, Any]] = {}
        self._requests: dict[str, dict[str, Any]] = {}
        self._decisions: dict[str, dict[str, Any]] = {}

    def look(self, url: str) -> None:
        """Take in what is new.

        Raises:
            InvalidInput: nobody answers there, or it is no admin port.
        """
        self.state = fetch(f"{url}/state")
        if "engine" not in self.state:
            raise InvalidInput(f"{url}/state", "", "does not answer as an admin port does")
        self.learned = fetch(f"{url}/step-table").get("table")
        if self.table is None:
            self.table = self.learned
        last = max(self._steps, default=0)
        # Steps go on while we look: a few more than there were, and no more than the ring holds.
        count = min(_MOST_STEPS, max(1, self._of_engine("step") - last + 64)) if last else _MOST_STEPS
        answer = fetch(f"{url}/steps?last={count}")
        self._steps |= {step["step"]: step for step in _members(answer, "steps", url, step=int)}
        decisions = fetch(f"{url}/decisions?last={_MOST_STEPS}")
        self._decisions |= {
            decision["request_id"]: decision
            for decision in _members(decisions, "decisions", url, request_id=str, arrived_us=int)
        }
        self._requests |= {
            request["request_id"]: request
            for request in _members(answer, "requests", url, request_id=str, queued_us=int)
        }

    @property
    def in_flight(self) -> int:
        """Requests in the engine when it was looked at last."""
        return self._of_engine("running_requests") + self._of_engine("waiting_requests")

    def _of_engine(self, name: str) -> int:
        engine = self.state.get("engine")
        value = engine.get(name) if isinstance(engine, dict) else None
        return value if isinstance(value, int) else 0

    def document(self, service: dict[str, Any] | None) -> dict[str, Any]:
        """The record."""
        return {
            "schema": SCHEMA,
            "service": service,
            "table": self.table,
            "learned": self.learned,
            "state": self.state,
            "steps": [self._steps[number] for number in sorted(self._steps)],
            "decisions": sorted(self._decisions.values(), key=lambda one: one["arrived_us"]),
            "requests": sorted(self._requests.values(), key=lambda one: one["queued_us"]),
        }


@click.command()
@click.argument("url", metavar="URL")
@click.option("--service", "service_file", metavar="FILE", help="The InferenceService that runs there.")
@click.option("--table", "table_file", metavar="FILE", help="Step times instead of those that the engine tells.")
@click.option("--for", "duration", metavar="DURATION", default="60s", show_default=True, help="How long to watch.")
@click.option("--output", "-o", "output", metavar="FILE", required=True, help="Where the record goes.")
def record(url: str, service_file: str | None, table_file: str | None, duration: str, output: str) -> int:
    """Watch a pod and write down what a replay needs.

    URL is a pod's admin port, such as http://127.0.0.1:9090. The best record begins and ends with an idle engine:
    requests that are under way at either end cannot be replayed.

    Exit codes: 0 written; 1 nothing ended while it watched; 2 wrong usage, or nobody answers there.
    """
    seconds = parse_duration_us(duration, "--for") / 1e6
    service = None if service_file is None else _service(service_file)
    watch = Watch()
    if table_file is not None:
        watch.table = _table(table_file)
    ends = time.monotonic() + seconds
    while True:
        watch.look(url.rstrip("/"))
        left = ends - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(_LOOK_EVERY_S, left))
    document = watch.document(service)
    try:
        Path(output).write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(output, "", f"cannot be written: {error.strerror}") from error
    click.echo(f"{output}: {len(document['steps']):,} steps, {len(document['requests']):,} requests that ended")
    if watch.in_flight:
        click.echo(f"{watch.in_flight:,} are under way still, and are left out", err=True)
    if document["table"] is None:
        click.echo("the engine tells no step times: a replay needs them from a scenario", err=True)
    return 0 if document["requests"] else 1


def fetch(url: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InvalidInput: nobody answers, or with something else.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidInput(url, "", "must begin with http:// or https://")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310  # the scheme was seen to
            document = json.load(response)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidInput(
            url, "", f"does not answer as an admin port does: {' '.join(str(reason).split())}"
        ) from error
    if not isinstance(document, dict):
        raise InvalidInput(url, "", "does not answer as an admin port does")
    return document


def _members(answer: dict[str, Any], name: str, url: str, **types: type) -> list[dict[str, Any]]:
    """The records under a name, each with what it is known and ordered by.

    Raises:
        InvalidInput: they are something else, so that whatever answers there is no admin port.
    """
    found = answer.get(name, [])
    for one in found if isinstance(found, list) else [None]:
        if not isinstance(one, dict) or any(not isinstance(one.get(key), kind) for key, kind in types.items()):
            raise InvalidInput(url, name, f"are no records with {' and '.join(types)}")
    return list(found)


def _service(file: str) -> dict[str, Any]:
    found = manifest.documents(file)
    if len(found) > 1:
        raise InvalidInput(file, "", f"holds {len(found)} InferenceServices: one is recorded")
    manifest.check(found[0], file)
    return found[0]


def _table(file: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = codec.encode(read_step_table(manifest.read_text(file)))
    except (EngineError, InvalidManifest, ValueError, RecursionError) as error:
        raise InvalidInput(file, "", f"is no step table: {error}") from error
    return table
