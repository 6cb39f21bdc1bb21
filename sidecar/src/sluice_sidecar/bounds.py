"""The bounds that gateways and clients put on a request in headers of their own, each with its own meaning.

Pure. What breaks a rule of its own is not obeyed and named, never a reason to refuse: whoever wrote it is not the
caller. Only relative times are read; an absolute one needs clocks that agree. Start reading at `added`.

| header | meaning here | source |
|---|---|---|
| `x-envoy-expected-rq-timeout-ms` | the whole answer; 0: no bound | Envoy, router filter |
| `grpc-timeout` | the whole answer | gRPC over HTTP/2 |
| `x-llm-d-slo-ttft-ms`, `x-slo-ttft-ms` | a promise of its own for the first token, no deadline; 0: none | llm-d, SLO-aware routing |
| `x-llm-d-inference-ttl` | the wait at the door only, which it may shorten; 0: no bound | llm-d, flow control |
| `x-stainless-read-timeout` | silence: for an answer that is not streamed, all of it | openai-python, `_build_headers` |

`x-llm-d-slo-tpot-ms` is not read: all who run share a step, so that no request has a pace of its own.
"""  # noqa: E501  # a table

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from sluice_engine.core.terms import MAX_BOUND_MS, Headers, Terms

ENVOY = "x-envoy-expected-rq-timeout-ms"
GRPC = "grpc-timeout"
SLO, OLD_SLO = "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"
TTL = "x-llm-d-inference-ttl"
SILENCE = "x-stainless-read-timeout"
HEADERS = (ENVOY, GRPC, SLO, OLD_SLO, TTL, SILENCE)

# A longer bound is none: it is as good as for ever.
MOST_US = MAX_BOUND_MS * 1000

_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")
_GRPC = re.compile(r"([0-9]{1,8})([HMSmun])")
_GRPC_UNIT_NS = {"H": 3_600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}
_GO_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ns|us|µs|ms|s|m|h)")
_GO = re.compile(f"(?:{_GO_PART.pattern})+")
_GO_UNIT_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3_600 * 10**9}


@dataclass(frozen=True, slots=True)
class Bounded:
    """The terms with every bound that was found, and the headers of which nothing could be made."""

    terms: Terms
    unreadable: tuple[str, ...] = ()


def added(terms: Terms, headers: Headers) -> Bounded:
    """The terms, bounded by what these headers say too: of two bounds with one meaning the tighter holds."""
    found: dict[str, int] = {}
    unreadable = []
    for name in HEADERS:
        values = {value.strip() for value in headers.getall(name, ())}
        if not values:
            continue
        bound_us = _bound_us(name, values.pop()) if len(values) == 1 else None
        if bound_us is None:
            unreadable.append(name)
        elif bound_us <= MOST_US and (bound_us or name == GRPC):
            # The others say with 0 that there is none; to gRPC the time is over.
            found[name] = bound_us
    if not found:
        return Bounded(terms, tuple(unreadable))
    bounded = replace(
        terms,
        finish_us=_tighter(terms.finish_us, found.get(ENVOY), found.get(GRPC)),
        promise_us=_tighter(terms.promise_us, found.get(SLO, found.get(OLD_SLO))),
        door_us=_tighter(terms.door_us, found.get(TTL)),
        silence_us=_tighter(terms.silence_us, found.get(SILENCE)),
    )
    return Bounded(bounded, tuple(unreadable))


def for_answer(terms: Terms, *, streamed: bool) -> Terms:
    """The terms once it is known how the answer goes out.

    A reader that gives up after a silence hears nothing of a whole answer before its end. A stream begins when the
    request is let in, and is never silent for long.
    """
    if terms.silence_us is None:
        return terms
    if streamed:
        return replace(terms, door_us=_tighter(terms.door_us, terms.silence_us))
    return replace(terms, finish_us=_tighter(terms.finish_us, terms.silence_us))


def _tighter(*bounds_us: int | None) -> int | None:
    known = [bound for bound in bounds_us if bound is not None]
    return min(known) if known else None


def _bound_us(name: str, value: str) -> int | None:
    """Microseconds; None where it says nothing that can be read."""
    if name == GRPC:
        grpc = _GRPC.fullmatch(value)
        return int(grpc[1]) * _GRPC_UNIT_NS[grpc[2]] // 1000 if grpc else None
    if name == TTL and value != "0":
        if _GO.fullmatch(value) is None:
            return None
        return int(sum(Fraction(part) * _GO_UNIT_NS[unit] for part, unit in _GO_PART.findall(value)) / 1000)
    if _NUMBER.fullmatch(value) is None:
        return None
    return int(Fraction(value) * (1_000_000 if name == SILENCE else 1000))
