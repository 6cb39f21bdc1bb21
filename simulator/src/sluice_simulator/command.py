"""`sluice simulate`: what a service would do under a load, in virtual time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from sluice_operator import plain_yaml
from sluice_simulator import page, plot, report, scenario, sweep
from sluice_simulator.errors import InvalidInput
from sluice_simulator.report import Json
from sluice_simulator.run import run

_MOST_RUNS = 1000


@click.command()
@click.argument("file", metavar="SCENARIO")
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
@click.option("--plot", "plot_file", metavar="PNG", help="Draw the run over time, or the curve of a sweep.")
@click.option("--html", "html_file", metavar="FILE", help="Write one page that holds everything.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def simulate(
    file: str,
    policy: str | None,
    settings: tuple[str, ...],
    sweeps: tuple[str, ...],
    plot_file: str | None,
    html_file: str | None,
    *,
    as_json: bool,
) -> int:
    """Tell what a service would do under a load.

    SCENARIO is a YAML file (docs/simulator.md); "-" is standard input. The engine's own scheduler and the gate's own
    admission run in virtual time. Steps take the time that a measured table, or
    the planning profile, says. The same scenario and seed give the same result.

    Exit codes: 0 it ran; 2 wrong usage, or a file or rule that is broken.
    """
    if plot_file:
        plot.require()
    document = scenario.load_document(file)
    changes = [_setting(one) for one in settings]
    if policy is not None:
        changes.append(("scheduling.policy", policy))
    if len(sweeps) > 2:
        raise click.BadParameter("at most two keys can be swept", param_hint="--sweep")
    axes = [_axis(one) for one in sweeps]
    runs = []
    for values in itertools.product(*(axis.values for axis in axes)):
        at = [(axis.key, value) for axis, value in zip(axes, values, strict=True)]
        parsed = scenario.parse(scenario.with_settings(document, [*changes, *at], file), file)
        runs.append((dict(at), report.document(run(parsed))))
    found: Json = runs[0][1] if not axes else sweep.document(axes, runs)
    _write(found, plot_file, html_file)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo("\n".join(sweep.text(found) if axes else report.text(found)))
    return 0


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
    read = list(_values(values.split(",")))
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
