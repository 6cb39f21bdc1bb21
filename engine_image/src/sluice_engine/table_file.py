"""A step table as a file: as an engine keeps it, or as it serves it at `/step-table`."""

from __future__ import annotations

from sluice_engine.codec import decode, loads
from sluice_engine.core.steptime import StepTable
from sluice_engine.errors import InvalidConfig


def read_step_table(text: str | bytes) -> StepTable:
    """The table in either document.

    Raises:
        InvalidConfig: not JSON, or a field is missing, unknown or of a wrong type; the message names it.
        ValueError: no grid.
        RecursionError: JSON nested too deeply.
    """
    try:
        document = loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig("table", f"is not JSON: {error}") from error
    if isinstance(document, dict) and "table" in document:
        document = document["table"]
    return decode(StepTable, document, "table")
