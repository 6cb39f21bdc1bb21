"""`sluice simulate`: what a service would do under a load, in virtual time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sluice_operator.resource import plain_yaml
from sluice_simulator import page, plot, replay, report, scenario, sweep
from sluice_simulator.errors import InvalidInput
from sluice_simulator.record import Record, read_record
from sluice_simulator.report import Json
from sluice_simulator.retrace import retrace
from sluice_simulator.run import assembled_of, run

_MOST_RUNS = 1000


@click.command()
@click.argument("file", metavar="[SCENARIO]", required=False)
@click.option("--policy", metavar="P", help="The queue's order, as scheduling.policy of the InferenceService.")
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a field of the service's spec, or a key of the scenario.",
)
@click.option(
    "--sweep",
    "sweeps",
    metavar="KEY=A,B,…",
    multiple=True,
    help="Run once for each value (of two keys: for each pair) and compare; A..B is every whole number between.",
)
@click.option(
    "--from",
    "record_file",
    metavar="RECORD",
    help="Replay what a real engine did, and tell the error; with --set, what would have happened.",
)
@click.option("--plot", "plot_file", metavar="PNG", help="Draw the run over time, or the curve of a sweep.")
@click.option("--html", "html_file", metavar="FILE", help="Write one page that holds everything.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def simulate(
    file: str | None,
    policy: str | None,
    settings: tuple[str, ...],
    sweeps: tuple[str, ...],
    record_file: str | None,
    plot_file: str | None,
    html_file: str | None,
    *,
    as_json: bool,
) -> int:
    """Tell what a service would do under a load.

    SCENARIO is a YAML file (docs/simulator.md); "-" is standard input. The engine's own scheduler and the gate's own
    admission run in virtual time; steps take the time that a measured table, or the planning profile, says. The same
    scenario and seed give the same result.

    Exit codes: 0 it ran; 2 wrong usage, or a file or rule that is broken.
    """
    for option, name in (("--plot", plot_file), ("--html", html_file)):
        if name == "":
            raise click.BadParameter("an empty text is no name of a file", param_hint=option)
    if plot_file:
        plot.require()
    changes = [_setting(one) for one in settings]
    if policy is not None:
        changes.append(("scheduling.policy", policy))
    if len(sweeps) > 2:
        raise click.BadParameter("at most two keys can be swept", param_hint="--sweep")
    record = None if record_file is None else read_record(Path(record_file))
    document, file = _document(file, record)
    axes = [_axis(one) for one in sweeps]
    runs = []
    for values in itertools.product(*(axis.values for axis in axes)):
        at = [(axis.key, value) for axis, value in zip(axes, values, strict=True)]
        parsed = scenario.parse(scenario.with_settings(document, [*changes, *at], file), file)
        runs.append((dict(at), report.document(run(parsed))))
    found: Json = runs[0][1] if not axes else sweep.document(axes, runs)
    if record is not None and not axes:
        found["replay"] = _compared(record, document, file, found if changes else None)
    _write(found, plot_file, html_file)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        lines = sweep.text(found) if axes else report.text(found)
        click.echo("\n".join([*lines, *(replay.text(found["replay"]) if "replay" in found else ())]))
    return 0


def _document(file: str | None, record: Record | None) -> tuple[dict[str, Any], str]:
    """The scenario, and where it stands."""
    if record is None:
        if file is None:
            raise click.UsageError("Name a SCENARIO, or a record with --from.")
        return scenario.load_document(file), file
    if file is None:
        return replay.with_record(replay.document_of(record), record), record.file
    return replay.with_record(scenario.load_document(file), record), file


def _compared(record: Record, document: dict[str, Any], file: str, changed: Json | None) -> Json:
    """How the record's own scenario compares with it; beside it, where something is changed, what would have been."""
    own = scenario.parse(document, file)
    plans = retrace(record, assembled_of(own))
    real, simulated = replay.measured(record), replay.predicted(report.document(run(own)))
    compared: Json = {
        "plans": asdict(plans),
        "recorded": real,
        "simulated": simulated,
        "error_percent": replay.error_percent(real, simulated),
    }
    if changed is not None:
        compared["changed"] = replay.predicted(changed)
    return compared


def _write(found: Json, plot_file: str | None, html_file: str | None) -> None:
    try:
        if plot_file:
            Path(plot_file).write_bytes(plot.png(found))
        if html_file:
            Path(html_file).write_text(page.html(found), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(str(error.filename), "", f"cannot be written: {error.strerror}") from error


def _setting(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise click.BadParameter(f"{text!r} is no setting: write KEY=VALUE", param_hint="--set")
    return key, _value(value, "--set")


def _value(text: str, option: str) -> Any:  # noqa: ANN401  # YAML
    try:
        (value,) = plain_yaml.load_all(text) or [None]
    except (plain_yaml.InvalidYAML, ValueError) as error:
        raise click.BadParameter(f"{text!r} is no value: {error}", param_hint=option) from error
    return value


def _axis(text: str) -> sweep.Axis:
    key, sign, values = text.partition("=")
    if not sign or not key or not values:
        raise click.BadParameter(f"{text!r} is no sweep: write KEY=A,B,…", param_hint="--sweep")
    parts = values.split(",")
    if not all(part.strip() for part in parts):
        raise click.BadParameter(f"{text!r} has an empty value: write null where none is meant", param_hint="--sweep")
    read = list(_values(parts))
    if not read:
        raise click.BadParameter(f"{text!r} has no value: a range A..B goes upwards", param_hint="--sweep")
    if len(read) > _MOST_RUNS:
        raise click.BadParameter(f"{len(read):,} runs are more than {_MOST_RUNS:,}", param_hint="--sweep")
    return sweep.Axis(key, read)


def _values(parts: Sequence[str]) -> Iterable[Any]:
    for part in parts:
        low, dots, high = part.partition("..")
        if dots and low.isdigit() and high.isdigit() and int(high) - int(low) < _MOST_RUNS:
            yield from range(int(low), int(high) + 1)
        else:
            yield _value(part, "--sweep")
