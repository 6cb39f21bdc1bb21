"""`sluice check`: would this manifest be accepted, and can its promise be kept?

Owns the report. The rules are the CRD's. Next: `verdict.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from sluice_engine.config import ModelSource
from sluice_engine.core.steptime import PlanningProfile, StepTimes
from sluice_engine.errors import EngineError
from sluice_engine.table_file import read_step_table
from sluice_operator.cli.verdict import Verdict, judge
from sluice_operator.cli.verdict_text import explain, ms
from sluice_operator.errors import InvalidManifest
from sluice_operator.resource import manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A file, or one InferenceService in it, that breaks a rule."""

    where: str
    problems: tuple[str, ...]


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--table", "table_file", metavar="FILE", help="Step times that an engine measured, instead of the planning profile."
)
@click.option(
    "--model",
    metavar="PATH",
    help="A folder or GGUF file of this machine: the shape and weights of the model of all FILEs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(files: tuple[str, ...], table_file: str | None, model: str | None, *, as_json: bool) -> int:
    """Check manifests, and whether they can keep their promise.

    A FILE holds InferenceServices; "-" is standard input. Each is held against the schema of this release (no cluster
    is asked), its promise against step times (those of --table, else those of the planning profile, which is an
    assumption), its memory limit against what it puts there, and the model, a demo's or --model's, against what the
    engine refuses at its start.

    Exit codes: 0 all fine; 1 a manifest breaks its own promise, its memory limit is too small for what it asks, or the
    engine would refuse it; 2 wrong usage, or a file or rule that is broken.
    """
    times, source = _times(table_file)
    given = None if model is None else ModelSource(path=model)
    found = [(file, one) for file in files for one in _judged(file, times, source, given)]
    refused = [one for _, one in found if isinstance(one, Refused)]
    verdicts = [one for _, one in found if isinstance(one, Verdict)]
    if as_json:
        click.echo(json.dumps([_document(file, one) for file, one in found], indent=2))
    elif verdicts:
        click.echo("\n\n".join("\n".join(explain(one)) for one in verdicts))
    for one in refused:
        for problem in one.problems:
            click.echo(f"sluice: {' '.join(f'{one.where}: {problem}'.split())}", err=True)
    if refused:
        return 2
    return 0 if all(one.is_kept and one.fits and not one.refusals for one in verdicts) else 1


def _judged(file: str, times: StepTimes, source: str, model: ModelSource | None) -> Iterator[Verdict | Refused]:
    """One answer for each InferenceService of a file, or one for a file that cannot be read."""
    try:
        documents = manifest.documents(file)
    except InvalidManifest as error:
        yield Refused(where=error.where, problems=error.problems)
        return
    for document in documents:
        try:
            yield judge(manifest.read_spec(document, file), times, source, model)
        except InvalidManifest as error:
            yield Refused(where=error.where, problems=error.problems)


def _document(file: str, one: Verdict | Refused) -> dict[str, Any]:
    if isinstance(one, Refused):
        return {"file": file, "where": one.where, "problems": one.problems, "is_kept": False}
    return {"file": file, **asdict(one), "problems": (), "is_kept": one.is_kept, "fits": one.fits}


def _times(table_file: str | None) -> tuple[StepTimes, str]:
    if table_file is None:
        profile = PlanningProfile()
        price = profile.per_prefill_token_ns / 1_000_000
        parts = f"{ms(profile.fixed_us)} + {ms(profile.decode_us)} for decodes + {price:g} ms a prefill token"
        return profile, f"planning profile: {parts}"
    text = manifest.read_text(table_file)
    try:
        table = read_step_table(text)
    except (EngineError, ValueError, RecursionError) as error:
        raise InvalidManifest(table_file, [f"is no step table: {error}"]) from error
    return table, f"measured: {table.measured_on or table_file}"
