"""`sluice explain`: one request's life, in sentences."""

from __future__ import annotations

import json

import click

from sluice_engine import codec
from sluice_operator.records import source
from sluice_operator.records.reconstruct import life_of
from sluice_operator.records.story import tell


@click.command()
@click.argument("where", metavar="URL|FILE")
@click.argument("request_id", metavar="REQUEST_ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(where: str, request_id: str, *, as_json: bool) -> int:
    """Tell one request's life in sentences.

    URL is a gate's admin port (9090), FILE what it once said. REQUEST_ID is the x-sluice-request-id of the answer, the
    x-request-id that the client sent, or ID/N for one choice of several.

    Exit codes: 0 told; 1 nobody knows such a request (any more); 2 wrong usage, nobody answers, or no records.
    """
    records = source.read(where)
    life = life_of(records, request_id)
    if life is None:
        steps = f"steps {records.steps[0].number:,} to {records.steps[-1].number:,}" if records.steps else "no step"
        decisions = f"the last {len(records.decisions):,} decisions of the gate"
        click.echo(f"sluice: no request {request_id} among {decisions} and {steps} of the engine", err=True)
        return 1
    click.echo(json.dumps(codec.encode(life), indent=2) if as_json else "\n".join(tell(life, records.now_us)))
    return 0
