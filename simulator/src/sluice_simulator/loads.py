"""The loads of a scenario: what each sends, and how its clients behave. Strict: see `fields`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sluice_engine.core.terms import CLASSES, STANDARD, Terms
from sluice_simulator.clients import ClientConfig, Retries
from sluice_simulator.errors import InvalidInput
from sluice_simulator.fields import Fields
from sluice_simulator.lengths import Lengths, read_lengths
from sluice_simulator.record import read_record
from sluice_simulator.recorded import Recorded
from sluice_simulator.traces import FORMATS, read_trace
from sluice_simulator.workload import Bursts, ClosedLoop, Poisson, Replay, Shape, Source, Stage, Stages

_KINDS = ("poisson", "bursts", "stages", "closedLoop", "trace", "record")
_MOST_PER_SECOND = 100_000
_MOST_CLIENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a request must fit into."""

    max_length_tokens: int
    pool_tokens: int

    @property
    def most_tokens(self) -> int:
        """Prompt and output of the largest request."""
        return min(self.max_length_tokens, self.pool_tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Clients of one kind."""

    name: str
    source: Source | ClosedLoop
    client: ClientConfig


def read_load(fields: Fields, room: Room, folder: Path) -> Load:
    """One load.

    Raises:
        InvalidInput: it breaks a rule.
    """
    name = fields.text("name", "load")
    max_tokens = fields.optional("maxTokens", lambda key: fields.whole(key, 1, room.most_tokens - 1))
    source = _read_source(fields, room, folder, max_tokens)
    client = _read_client(fields)
    fields.end()
    return Load(name=name, source=source, client=client)


def _read_source(fields: Fields, room: Room, folder: Path, max_tokens: int | None) -> Source | ClosedLoop:
    arrivals = fields.section("arrivals")
    kinds = [kind for kind in _KINDS if arrivals.has(kind)]
    if len(kinds) != 1:
        raise fields.problem("arrivals", f"must name exactly one of {', '.join(_KINDS)}")
    if kinds[0] == "trace":
        source: Source | ClosedLoop = _read_replay(arrivals.section("trace"), room, folder, max_tokens)
    elif kinds[0] == "record":
        recorded = arrivals.section("record")
        source = Recorded(read_record(folder / recorded.text("file")))
        recorded.end()
    else:
        shape = _read_shape(fields, room, max_tokens)
        if kinds[0] == "stages":
            stages = Stages(stages=tuple(map(_read_stage, arrivals.sections("stages"))), shape=shape)
            arrivals.end()
            return stages
        one = arrivals.section(kinds[0])
        if kinds[0] == "poisson":
            source = Poisson(per_second=one.number("requestsPerSecond", 1e-6, _MOST_PER_SECOND), shape=shape)
        elif kinds[0] == "bursts":
            source = _read_bursts(one, shape)
        else:
            source = ClosedLoop(
                clients=one.whole("clients", 1, _MOST_CLIENTS), think_us=one.duration_us("thinkTime", 0), shape=shape
            )
        one.end()
    arrivals.end()
    return source


def _read_bursts(fields: Fields, shape: Shape) -> Bursts:
    every_us = fields.duration_us("every", least_us=1)
    lasting_us = fields.duration_us("lasting", least_us=1)
    if lasting_us >= every_us:
        raise fields.problem("lasting", "must be shorter than every")
    burst = fields.number("burstRequestsPerSecond", 1e-6, _MOST_PER_SECOND)
    return Bursts(
        per_second=fields.number("requestsPerSecond", 0, _MOST_PER_SECOND),
        burst_per_second=burst,
        every_us=every_us,
        lasting_us=lasting_us,
        shape=shape,
    )


def _read_stage(fields: Fields) -> Stage:
    rate, lasting_us = (
        fields.number("requestsPerSecond", 0, _MOST_PER_SECOND),
        fields.duration_us("lasting", least_us=1),
    )
    fields.end()
    return Stage(rate, lasting_us)


def _read_shape(fields: Fields, room: Room, max_tokens: int | None) -> Shape:
    output = read_lengths(fields.section("outputTokens"), room.most_tokens - 1)
    asked = max_tokens if max_tokens is not None else output.most
    prompt_fields = fields.section("promptTokens")
    names_most = prompt_fields.has("most") or prompt_fields.has("tokens")
    prompt = read_lengths(prompt_fields, room.most_tokens - 1)
    if prompt.most + asked > room.most_tokens:
        if names_most or prompt.mean + asked > room.most_tokens:
            problem = (
                f"prompts of {prompt.most:,} tokens and answers of {asked:,} do not fit: a request may have "
                f"{room.most_tokens:,} tokens"
            )
            raise prompt_fields.problem("", problem)
        prompt = Lengths(
            distribution=prompt.distribution, mean=prompt.mean, least=prompt.least, most=room.most_tokens - asked,
            sigma=prompt.sigma,
        )  # fmt: skip
    heads = fields.section("sharedPrefix")
    shared = head_tokens = 0
    if heads.has("tokens"):
        head_tokens = heads.whole("tokens", 1, room.most_tokens)
        shared = heads.whole("variants", 1, 1_000_000, 1)
    heads.end()
    leavers = fields.section("abandons")
    percent, within_us = 0.0, 0
    if leavers.has("percent"):
        percent, within_us = leavers.number("percent", 0, 100), leavers.duration_us("within", least_us=1)
    leavers.end()
    return Shape(
        prompt=prompt, output=output, max_tokens=max_tokens, shared_heads=shared, head_tokens=head_tokens,
        abandons_percent=percent, abandons_within_us=within_us,
    )  # fmt: skip


def _read_replay(fields: Fields, room: Room, folder: Path, max_tokens: int | None) -> Replay:
    trace_format = fields.choice("format", FORMATS)
    path = folder / fields.text("file")
    speed_up = fields.number("speedUp", 0.001, 100_000, 1.0)
    from_us = fields.duration_us("from", 0)
    to_us = fields.optional("to", fields.duration_us)
    sends_too_long = fields.choice("tooLong", ("Error", "Send"), "Error") == "Send"
    fields.end()
    if to_us is not None and to_us <= from_us:
        raise fields.problem("to", "must be later than from")
    trace = read_trace(path, trace_format)  # type: ignore[arg-type]  # one of FORMATS
    if from_us > trace.times_us[-1]:
        raise fields.problem("from", f"is after the last request of {path}")
    for index, (prompt, output) in enumerate(zip(trace.prompts, trace.outputs, strict=True)):
        total = prompt + (max_tokens if max_tokens is not None else output)
        if total > room.most_tokens and not sends_too_long:
            problem = (
                f"a request of {total:,} tokens can never fit: {room.most_tokens:,} may (machine.maxLengthTokens, "
                "machine.kvCapacityTokens); tooLong: Send has the gate refuse it"
            )
            raise InvalidInput(str(path), f"line {trace.lines[index]}", problem)
    return Replay(trace=trace, speed_up=speed_up, from_us=from_us, to_us=to_us, max_tokens=max_tokens)


def _read_client(fields: Fields) -> ClientConfig:
    patience_us = fields.optional("patience", lambda key: fields.duration_us(key, least_us=1))
    timeout_us = fields.optional("timeout", lambda key: fields.duration_us(key, least_us=1))
    first_us = fields.optional("firstTokenDeadline", lambda key: fields.duration_us(key, least_us=1))
    deadline_us = fields.optional("deadline", lambda key: fields.duration_us(key, least_us=1))
    if deadline_us is not None and first_us is not None and first_us > deadline_us:
        raise fields.problem("firstTokenDeadline", "must not be later than deadline")
    terms = Terms(
        service_class=fields.choice("class", CLASSES, STANDARD),
        tenant=fields.optional("tenant", fields.text) or "",
        first_token_us=first_us,
        finish_us=deadline_us,
    )
    retries = fields.section("retries")
    read = Retries(
        most=retries.whole("most", 0, 1000, 2),
        initial_us=retries.duration_us("initial", 500_000),
        longest_us=retries.duration_us("longest", 8_000_000),
        jitter_percent=retries.number("jitterPercent", 0, 100, 25.0),
        factor=retries.number("factor", 1, 10, 2.0),
        honour_retry_after=retries.flag("honourRetryAfter", default=True),
        tells_attempt=retries.flag("tellsAttempt", default=True),
        after_patience=retries.flag("afterPatience", default=True),
        budget_percent=retries.optional("budgetPercent", lambda key: retries.number(key, 0, 1000)),
    )
    retries.end()
    if read.longest_us < read.initial_us:
        raise retries.problem("longest", "must not be shorter than initial")
    if read.most and read.budget_percent == 0:
        raise retries.problem("budgetPercent", f"0 allows no retry, and most is {read.most}: set most: 0")
    return ClientConfig(patience_us=patience_us, timeout_us=timeout_us, terms=terms, retries=read)
