"""A record of a real engine: what its `/steps` said, and what it takes to build the same engine again.

Owns the file's form, a JSON object: `steps` and `requests` as `/steps?last=N` gives them and, where `sluice record`
wrote it, `state` (the gate's), `service` (the manifest) and `table` (the measured step times). Unknown keys are let
through: a newer engine may say more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice_engine import codec
from sluice_engine.config import CacheConfig
from sluice_engine.core.ended import EndedRequest
from sluice_engine.core.state import EngineState
from sluice_engine.core.steptime import StepTable
from sluice_engine.errors import EngineError
from sluice_simulator.errors import InvalidInput
from sluice_simulator.fields import MOST_TOKENS

SCHEMA = "sluice.dev/record/1"
_MOST_BYTES = 1 << 30
_KEY = re.compile(r"[0-9a-f]{1,12}")
_DEFAULT_BLOCK_TOKENS = CacheConfig().block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedShare:
    """One request's share of a step."""

    request_id: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What matters of a step record here."""

    step: int
    start_us: int
    real_us: int
    scheduled: tuple[RecordedShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record, oldest first."""

    file: str
    steps: tuple[RecordedStep, ...]
    requests: tuple[EndedRequest, ...]
    """By the step at which the engine took them in."""
    engine: EngineState | None
    service: dict[str, Any] | None
    table: StepTable | None
    """What the engine began with."""
    learned: StepTable | None
    """What it had learned of the same steps by the end."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""
        pool = None if self.engine is None else self.engine.pool
        return _DEFAULT_BLOCK_TOKENS if pool is None else pool.block_tokens


def read_record(path: Path) -> Record:
    """The record in a file.

    Raises:
        InvalidInput: it is none, or breaks a rule.
    """
    file = str(path)
    document = _document(path)
    try:
        steps = tuple(
            codec.decode(RecordedStep, item, f"steps[{index}]", ignore_unknown=True)
            for index, item in enumerate(_list(document, "steps", file))
        )
        requests = [
            codec.decode(EndedRequest, item, f"requests[{index}]", ignore_unknown=True)
            for index, item in enumerate(_list(document, "requests", file))
        ]
        tables = [document.get(key) for key in ("table", "learned")]
        table, learned = (
            None if one is None else codec.decode(StepTable, one, key)
            for key, one in zip(("table", "learned"), tables, strict=True)
        )
        engine = _engine(document.get("state"))
        record = Record(
            file=file,
            steps=steps,
            requests=tuple(sorted(requests, key=lambda one: (one.queued_step, one.queued_us))),
            engine=engine,
            service=document.get("service"),
            table=table,
            learned=learned,
        )
    except (EngineError, ValueError) as error:
        raise InvalidInput(file, "", str(error)) from error
    _check(record)
    return record


def _check(record: Record) -> None:
    if not record.requests:
        raise InvalidInput(record.file, "requests", "none has ended: there is nothing to replay")
    for index, step in enumerate(record.steps):
        if index and (step.step <= record.steps[index - 1].step or step.start_us < record.steps[index - 1].start_us):
            raise InvalidInput(record.file, f"steps[{index}]", "comes before the step above: steps must not fall")
        if step.real_us < 0:
            raise InvalidInput(record.file, f"steps[{index}].real_us", "must not be negative")
    for index, request in enumerate(record.requests):
        _check_request(request, f"requests[{index}]", record.file)
    if record.service is not None and not isinstance(record.service, dict):
        raise InvalidInput(record.file, "service", "must be an InferenceService")


def _check_request(request: EndedRequest, place: str, file: str) -> None:
    if not all(1 <= count <= MOST_TOKENS for count in (request.prompt_tokens, request.max_tokens)):
        raise InvalidInput(file, place, "prompt_tokens and max_tokens must be 1 or more")
    if not 0 <= request.output_tokens <= request.max_tokens:
        raise InvalidInput(file, f"{place}.output_tokens", f"must be 0 to {request.max_tokens}")
    if not all(_KEY.fullmatch(key) for key in request.prompt_keys):
        raise InvalidInput(file, f"{place}.prompt_keys", "must be hexadecimal, of at most 12 digits")
    if not 0 <= request.arrival_us <= request.queued_us <= request.ended_us:
        raise InvalidInput(file, place, "arrival_us, queued_us and ended_us must follow each other")


def _document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidInput(str(path), "", "is larger than 1 GiB, which no record is")
        document = codec.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(path), "", error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(str(path), "", f"is not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise InvalidInput(str(path), "", "must be an object with steps and requests")
    return document


def _list(document: dict[str, Any], key: str, file: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise InvalidInput(file, key, "must be a list: what /steps?last=N of an admin port answers has it")
    return value


def _engine(state: object) -> EngineState | None:
    engine = state.get("engine") if isinstance(state, dict) else None
    return None if engine is None else codec.decode(EngineState, engine, "state.engine", ignore_unknown=True)
