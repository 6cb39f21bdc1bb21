"""The step records of `/steps` as typed values: the reader's side of `sluice_engine.core.trace`.

Owns tolerance: what a newer engine adds is ignored, what an older one leaves out has a default, and everything else
that is odd is one line that names the place. Built by hand and not by the codec, for there may be hundreds of thousands
of shares. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice_operator.errors import InvalidRecords


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a step: its tokens [start, start + num_tokens)."""

    request_id: str
    slot: int
    start: int
    num_tokens: int
    sampled: bool
    """Whether it caught up with all it knew, so that a token came of it."""

    @property
    def end(self) -> int:
        """Tokens computed after the step."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Preempted:
    """A victim, and both prices."""

    request_id: str
    num_computed: int
    freed_blocks: int
    recompute_us: int
    swap_us: int | None
    """None where it could not be swapped."""
    choice: str
    """recompute or swap."""
    reason: str
    """Why that: cheaper, set, or what stood in the way of the other."""
    beneficiary_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as it was planned and as it ran."""

    number: int
    begin_us: int
    """On the engine's clock; never before the end of the step before, though it may have been handed over earlier."""
    end_us: int
    predicted_us: int
    real_us: int
    decode_requests: int
    prefill_tokens: int
    tokens_left: int
    prefill_left: int
    free_blocks_before: int
    free_blocks_after: int
    shares: tuple[Share, ...]
    preempted: tuple[Preempted, ...] = ()
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Requests that stayed out, by what held them."""
    held_back: Mapping[str, str] = field(default_factory=dict)
    """What held those of them that were looked at, by request."""
    expired: tuple[str, ...] = ()
    """Requests whose deadline passed, or could no longer be met."""
    swapped_out_blocks: int = 0
    """Copied to the host before it ran."""
    swapped_in_blocks: int = 0
    """Copied back."""

    def share_of(self, request_id: str) -> Share | None:
        """What a request ran in it; None when it did not."""
        return next((share for share in self.shares if share.request_id == request_id), None)


def read_steps(documents: Iterable[Any]) -> list[Step]:
    """The steps in order.

    Raises:
        InvalidRecords: one of them is no step record; the text names it and what is wrong.
    """
    steps: list[Step] = []
    for index, document in enumerate(documents):
        try:
            after_us = steps[-1].end_us if steps else 0
            steps.append(_step(document, after_us))
        except KeyError as error:
            raise InvalidRecords(f"steps[{index}].{error.args[0]} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRecords(f"steps[{index}] is no step record: {error}") from error
        if len(steps) > 1 and steps[-1].number <= steps[-2].number:
            raise InvalidRecords(f"steps[{index}].step is {steps[-1].number}, after {steps[-2].number}: not in order")
    return steps


def _step(document: Any, after_us: int) -> Step:  # noqa: ANN401  # parsed JSON
    start_us, real_us = int(document["start_us"]), int(document["real_us"])
    if start_us < 0 or real_us < 0:
        raise ValueError("a time is negative")
    end_us = max(start_us + real_us, after_us)
    return Step(
        number=int(document["step"]),
        begin_us=min(max(start_us, after_us), end_us),
        end_us=end_us,
        predicted_us=int(document["predicted_us"]),
        real_us=real_us,
        decode_requests=int(document["decode_requests"]),
        prefill_tokens=int(document["prefill_tokens"]),
        tokens_left=int(document["tokens_left"]),
        prefill_left=int(document["prefill_left"]),
        free_blocks_before=int(document["free_blocks_before"]),
        free_blocks_after=int(document["free_blocks_after"]),
        shares=tuple(map(_share, document["scheduled"])),
        preempted=tuple(map(_preempted, document["preempted"])),
        waiting={str(gate): int(number) for gate, number in document["waiting_reasons"].items()},
        held_back={str(one["request_id"]): str(one["reason"]) for one in document.get("held_back", ())},
        expired=tuple(map(str, document.get("expired", ()))),
        swapped_out_blocks=int(document.get("swapped_out_blocks", 0)),
        swapped_in_blocks=int(document.get("swapped_in_blocks", 0)),
    )


def _share(document: Any) -> Share:  # noqa: ANN401
    return Share(
        str(document["request_id"]),
        int(document["slot"]),
        int(document["start"]),
        int(document["num_tokens"]),
        bool(document["sampled"]),
    )


def _preempted(document: Any) -> Preempted:  # noqa: ANN401
    price = document.get("price") or document
    swap_us = price.get("swap_us")
    return Preempted(
        str(document["request_id"]),
        int(document["num_computed"]),
        int(document["freed_blocks"]),
        int(price["recompute_us"]),
        None if swap_us is None else int(swap_us),
        str(price.get("choice", "recompute")),
        str(price.get("reason", "")),
        str(document["beneficiary_id"]),
    )
