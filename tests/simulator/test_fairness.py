"""What the door promises to tenants and sizes, with the gate's own classes in virtual time, beside controls."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from simulator.scenes import SMALL, outcome
from sluice_sidecar.waiting.sizes import SizeGuard
from sluice_simulator.run import Finished


def load(name: str, per_second: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "arrivals": {"poisson": {"requestsPerSecond": per_second}},
        "promptTokens": {"distribution": "LogNormal", "mean": 200},
        "outputTokens": {"mean": 12},
        "retries": {"most": 0},
        **changes,
    }


def under(*loads: dict[str, Any], kv_tokens: int = 4096, seconds: int = 15) -> Finished:
    document = copy.deepcopy(SMALL) | {"duration": f"{seconds}s", "warmup": "2s", "loads": list(loads)}
    document["machine"] = {"kvCapacityTokens": kv_tokens}
    return outcome(document)


def let_in_by_size(done: Finished) -> list[float]:
    """The share that was let in, by decile of the prompts' lengths."""
    gate = done.replicas[0].gate
    assert gate is not None
    asked = sorted((decision.prompt_tokens, decision.verdict == "admitted") for decision in gate.decisions.last(4096))
    cuts = [len(asked) * tenth // 10 for tenth in range(11)]
    return [sum(let_in for _, let_in in asked[low:high]) / (high - low) for low, high in itertools.pairwise(cuts)]


def jain(done: Finished) -> float:
    """1 where every load got as many tokens as any other."""
    had = [tally.prompt_tokens + tally.output_tokens for tally in done.tally.loads.values()]
    return sum(had) ** 2 / (len(had) * sum(tokens**2 for tokens in had))


def p99_ttft_us(done: Finished, name: str) -> int:
    found = done.tally.loads[name].ttft.quantile_us(99)
    assert found is not None
    return found


@pytest.mark.parametrize("is_guarded", [pytest.param(True, id="guarded"), pytest.param(False, id="control")])
def test_the_longest_prompts_get_in_six_tenths_as_often_as_the_shortest(
    monkeypatch: pytest.MonkeyPatch, *, is_guarded: bool
) -> None:
    if not is_guarded:
        monkeypatch.setattr(SizeGuard, "kept_for", lambda *_: None)
        monkeypatch.setattr(SizeGuard, "is_ahead", lambda *_: False)

    shares = let_in_by_size(under(load("chat", 90)))

    assert (shares[-1] >= 0.6 * shares[0]) == is_guarded, shares


@pytest.mark.parametrize("named", [pytest.param(True, id="by-tenant"), pytest.param(False, id="control")])
def test_tenants_that_all_want_more_than_their_share_get_the_same(*, named: bool) -> None:
    rates = {"flood": 80, "a": 25, "b": 25, "c": 25}
    loads = (load(name, rate, **({"tenant": name} if named else {})) for name, rate in rates.items())
    # Long enough that the turns of single requests, of all sizes, even out.
    done = under(*loads, kv_tokens=8192, seconds=60)

    assert (jain(done) >= 0.95) == named, jain(done)


def test_a_tenant_at_ten_times_its_share_does_not_slow_the_others() -> None:
    names = ("a", "b", "c", "d")
    each = 8

    even = under(*(load(name, each, tenant=name) for name in ("flood", *names)), seconds=30)
    flooded = under(*(load(name, each * (10 if name == "flood" else 1), tenant=name) for name in ("flood", *names)))

    before = sum(p99_ttft_us(even, name) for name in names)
    after = sum(p99_ttft_us(flooded, name) for name in names)
    assert after <= 1.15 * before, (before, after)
