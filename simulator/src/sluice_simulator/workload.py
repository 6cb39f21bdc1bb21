"""What arrives: open streams (Poisson, bursts, traces, records) and closed loops, drawn lazily and in order.

Owns the arrivals' times, lengths and contents. Must not know how a client behaves once it was answered (`clients`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sluice_simulator.lengths import Lengths
from sluice_simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace

# Never drawn by a model here but to end an answer.
END_TOKEN = 0

_MOST_LOADS = 1024


@dataclass(frozen=True, slots=True)
class Content:
    """What a prompt says, as far as it matters: which leading blocks it shares with others."""

    heads: tuple[int, ...] = ()
    """Ids of the leading blocks: equal ids are equal tokens."""
    head_tokens: int = MOONCAKE_BLOCK_TOKENS

    def of_load(self, index: int) -> Content:
        """The same, told apart from other loads' heads of the same ids."""
        if not self.heads:
            return self
        return Content(tuple(head * _MOST_LOADS + index for head in self.heads), self.head_tokens)


@dataclass(slots=True)
class Arrival:
    """One request as its client means it."""

    time_us: int
    prompt_tokens: int
    output_tokens: int
    """Tokens that the model will draw, its end among them."""
    max_tokens: int
    """What the client asks for: output_tokens ends by length where they are equal, else by the model."""
    content: Content = Content()
    key: str = ""
    """Its name in the record that it comes from."""
    waited_us: int = 0
    """It had come this long before: a record's times are those at which the engine took requests in."""
    priority: int | None = None
    """None: its load's."""
    tenant: str | None = None
    """None: its load's."""
    leaves_us: int | None = None
    """When its client leaves, whatever has come by then."""


def prompt_of(arrival: Arrival, number: int) -> list[int]:
    """Token ids: equal where prompts share a head, the request's own number elsewhere. Never `END_TOKEN`."""
    content = arrival.content
    if not content.heads:
        return [2 * number + 1] * arrival.prompt_tokens
    tokens = [2 * head + 2 for head in content.heads for _ in range(content.head_tokens)]
    del tokens[arrival.prompt_tokens :]
    tokens += [2 * number + 1] * (arrival.prompt_tokens - len(tokens))
    return tokens


def text_of(arrival: Arrival, number: int) -> bytes:
    """What a gate reads of a prompt whose beginning others share: eight bytes for two tokens. Empty where none does."""
    content = arrival.content
    if not content.heads:
        return b""
    size = 4 * content.head_tokens
    text = b"".join((head.to_bytes(8, "little") * -(-size // 8))[:size] for head in content.heads)
    return (text + (b"%d " % number) * arrival.prompt_tokens)[: 4 * arrival.prompt_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths of what a load sends."""

    prompt: Lengths
    output: Lengths
    max_tokens: int | None
    """None: each request asks for exactly what it gets."""
    shared_heads: int = 0
    """Prompts begin with one of this many heads; 0: with none."""
    head_tokens: int = 0
    abandons_percent: float = 0.0
    """So many of the clients leave, whatever has come by then."""
    abandons_within_us: int = 0
    """Those leave at any moment, all alike, so soon after they came."""

    def draw(self, time_us: int, source: random.Random) -> Arrival:
        """One request."""
        prompt, output = self.prompt.draw(source), self.output.draw(source)
        if self.max_tokens is not None:
            output = min(output, self.max_tokens)
        content = Content()
        if self.shared_heads:
            content = Content((source.randrange(self.shared_heads),), self.head_tokens)
        leaves_us = None
        if self.abandons_percent and source.random() * 100 < self.abandons_percent:
            leaves_us = time_us + source.randrange(self.abandons_within_us)
        return Arrival(time_us, prompt, output, self.max_tokens or output, content, leaves_us=leaves_us)


class Source(Protocol):
    """An open stream."""

    def arrivals(self, source: random.Random, until_us: int | None) -> Iterator[Arrival]:
        """Requests in order of time, before `until_us`."""
        ...

    @property
    def last_us(self) -> int | None:
        """When the last one comes, at most; None: it has no end of its own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent arrivals at a steady rate."""

    per_second: float
    shape: Shape

    @property
    def last_us(self) -> int | None:
        """It has no end of its own."""
        return None

    def arrivals(self, source: random.Random, until_us: int | None) -> Iterator[Arrival]:
        """Requests in order of time."""
        time_us = 0
        while self.per_second:
            time_us += round(source.expovariate(self.per_second) * 1e6)
            if until_us is not None and time_us >= until_us:
                return
            yield self.shape.draw(time_us, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Poisson arrivals whose rate jumps: the burst's for `lasting_us` out of every `every_us`, then the base rate."""

    per_second: float
    burst_per_second: float
    every_us: int
    lasting_us: int
    shape: Shape

    @property
    def last_us(self) -> int | None:
        """It has no end of its own."""
        return None

    def arrivals(self, source: random.Random, until_us: int | None) -> Iterator[Arrival]:
        """Requests in order of time."""
        most = max(self.per_second, self.burst_per_second)
        time_us = 0
        while True:
            # Thinning: candidates at the higher rate, kept in proportion to the rate of their moment.
            time_us += round(source.expovariate(most) * 1e6)
            if until_us is not None and time_us >= until_us:
                return
            in_burst = time_us % self.every_us < self.lasting_us
            if source.random() * most < (self.burst_per_second if in_burst else self.per_second):
                yield self.shape.draw(time_us, source)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a load's life."""

    per_second: float
    lasting_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Poisson arrivals whose rate changes from stage to stage; the last one's holds on to the end."""

    stages: tuple[Stage, ...]
    shape: Shape

    @property
    def last_us(self) -> int | None:
        """It has no end of its own."""
        return None

    def arrivals(self, source: random.Random, until_us: int | None) -> Iterator[Arrival]:
        """Requests in order of time."""
        from_us = 0
        for index, stage in enumerate(self.stages):
            to_us = None if index == len(self.stages) - 1 else from_us + stage.lasting_us
            # A process without memory: what the stage before would have sent next is nothing to this one.
            for arrival in Poisson(per_second=stage.per_second, shape=self.shape).arrivals(
                source, _earlier(None if to_us is None else to_us - from_us, until_us, from_us)
            ):
                arrival.time_us += from_us
                yield arrival
            from_us += stage.lasting_us
            if until_us is not None and from_us >= until_us:
                return


def _earlier(lasting_us: int | None, until_us: int | None, from_us: int) -> int | None:
    """How long a stage lasts that the run may cut short."""
    left = [one for one in (lasting_us, None if until_us is None else until_us - from_us) if one is not None]
    return min(left) if left else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A trace, or part of it, at its own pace or faster."""

    trace: Trace
    speed_up: float = 1.0
    from_us: int = 0
    """In the trace's own time."""
    to_us: int | None = None
    max_tokens: int | None = None
    """None: each request asks for exactly what it gets."""

    def arrivals(self, source: random.Random, until_us: int | None) -> Iterator[Arrival]:
        """Requests in order of time."""
        del source
        trace = self.trace
        for index, at_us in enumerate(trace.times_us):
            if at_us < self.from_us:
                continue
            time_us = self.time_us(at_us)
            if (self.to_us is not None and at_us >= self.to_us) or (until_us is not None and time_us >= until_us):
                return
            output = trace.outputs[index]
            if self.max_tokens is not None:
                output = min(output, self.max_tokens)
            yield Arrival(
                time_us,
                trace.prompts[index],
                output,
                self.max_tokens or output,
                Content(trace.heads[index]) if trace.heads is not None else Content(),
            )

    def time_us(self, at_us: int) -> int:
        """When something of the trace's own time happens here."""
        return round((at_us - self.from_us) / self.speed_up)

    @property
    def last_us(self) -> int:
        """When the last request arrives, at most."""
        last_us = self.trace.times_us[-1]
        return self.time_us(max(self.from_us, last_us if self.to_us is None else min(last_us, self.to_us)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Clients that send, wait for the end, think, and send again."""

    clients: int
    think_us: int
    """Mean; drawn from an exponential distribution."""
    shape: Shape

    def think(self, source: random.Random) -> int:
        """A pause, in microseconds."""
        return round(source.expovariate(1 / self.think_us)) if self.think_us else 0
