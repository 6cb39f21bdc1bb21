"""`sluice trace`: the last steps of an engine as a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sluice_operator.errors import InvalidSettings
from sluice_operator.records import source
from sluice_operator.records.perfetto import trace_of


@click.command()
@click.argument("where", metavar="URL|FILE")
@click.option("--output", "-o", metavar="FILE", help="Write there instead of to standard output.")
@click.option("--json", "as_json", is_flag=True, help="With -o: say what was written as one JSON document.")
def trace(where: str, output: str | None, *, as_json: bool) -> int:
    """Write the last steps as a trace for ui.perfetto.dev.

    URL is a gate's admin port (9090), FILE what it once said. The trace is JSON in the Trace Event Format: a row a slot
    with its prefill and decodes, the waits, and counters of batch, KV blocks and queue.

    Exit codes: 0 written; 1 the engine has run no step; 2 wrong usage, nobody answers, no records, no place to write.
    """
    records = source.read(where)
    if not records.steps:
        click.echo(f"sluice: {where}: the engine has run no step", err=True)
        return 1
    drawn = trace_of(records)
    text = json.dumps(drawn, ensure_ascii=False, separators=(",", ":"))
    if output is None:
        click.echo(text)
        return 0
    try:
        Path(output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidSettings(f"--output {output} cannot be written: {error.strerror}") from error
    first, last = records.steps[0].number, records.steps[-1].number
    said = {"file": output, "events": len(drawn["traceEvents"]), "first_step": first, "last_step": last}
    if as_json:
        click.echo(json.dumps(said))
    else:
        click.echo(f"{output}: {said['events']:,} events of steps {first:,} to {last:,}; open it in ui.perfetto.dev")
    return 0
