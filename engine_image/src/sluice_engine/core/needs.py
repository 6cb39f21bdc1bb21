"""What a request takes of each budget. A new budget is a limit given to the scheduler and a line here.

Lasting budgets are held as long as a request runs, the others for one step. Start reading at `lasting_needs`.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice_engine.core.budgets import Budgets, Needs
from sluice_engine.core.request import Request

LASTING = ("requests", "adapters")
"""Budgets that are held as long as a request runs; what is not named here is a step's."""

DECODE_NEEDS = Needs({"tokens": 1})


def lasting_needs(request: Request) -> Needs:
    """A place, and its adapter, which it shares with all others of that adapter."""
    return Needs({"requests": 1}, {"adapters": request.adapter} if request.adapter else {})


def chunk_needs(request: Request, start: int, num_tokens: int) -> Needs:
    """What computing these tokens of a prompt takes: an item of media is encoded with the first of its tokens."""
    amounts = {"tokens": num_tokens, "prefill_tokens": num_tokens}
    inside = [item for item in request.media if start <= item.position < start + num_tokens]
    if inside:
        amounts["media_items"] = len(inside)
        amounts["encoder_tokens"] = sum(item.encoder_tokens for item in inside)
    return Needs(amounts)


def draft_needs(num_drafts: int) -> Needs:
    """What computing a decode's newest token with guesses after it takes: to the device it is a chunk."""
    return Needs({"tokens": 1 + num_drafts, "prefill_tokens": 1 + num_drafts, "draft_tokens": num_drafts})


def fitting_tokens(request: Request, start: int, num_tokens: int, budgets: Budgets) -> int:
    """How many of these tokens the step can still take: up to the first item of media that it cannot."""
    for item in request.media:
        if start <= item.position < start + num_tokens:
            up_to = item.position - start
            if budgets.lacking(chunk_needs(request, start, up_to + 1)) is not None:
                return up_to
    return num_tokens


def never_fitting(request: Request, limits: Mapping[str, int]) -> str | None:
    """Why a request could never run under these limits, in words; None when it can."""
    most = limits.get("encoder_tokens")
    largest = max((item.encoder_tokens for item in request.media), default=0)
    if most is not None and largest > most:
        return f"an item of media needs {largest} encoder tokens; a step has {most}"
    if request.media and limits.get("media_items", 1) < 1:
        return "a step takes no media"
    if request.adapter and limits.get("adapters", 1) < 1:
        return "no adapter may be in use"
    return None
