from __future__ import annotations

import pytest

from sluice_sidecar.telemetry.regret import Regret, Verdicts


@pytest.mark.parametrize(
    ("shed", "promise", "outcome", "kind"),
    [
        pytest.param(True, "kept", "completed", "shed_but_met", id="shed-and-it-would-have-met"),
        pytest.param(True, "ttft_missed", "completed", "", id="shed-rightly"),
        pytest.param(False, "kept", "completed", "", id="let-in-rightly"),
        pytest.param(False, "ttft_missed", "completed", "admitted_but_missed", id="let-in-and-late"),
        pytest.param(False, "itl_missed", "completed", "admitted_but_missed", id="let-in-and-slow"),
        pytest.param(False, "", "expired", "admitted_but_missed", id="let-in-and-too-late-for-its-own-deadline"),
        pytest.param(True, "", "expired", "", id="shed-and-it-would-have-been-too-late"),
        pytest.param(False, "", "client_left", "", id="a-client-that-left-says-nothing"),
        pytest.param(True, "", "failed", "", id="a-fault-says-nothing"),
    ],
)
def test_a_verdict_is_held_against_what_became_of_it(*, shed: bool, promise: str, outcome: str, kind: str) -> None:
    assert Regret().judge(promise, outcome, shed=shed) == kind


def test_counts() -> None:
    regret = Regret()
    for shed, promise, outcome in [
        (True, "kept", "completed"),
        (True, "ttft_missed", "completed"),
        (False, "kept", "completed"),
        (False, "kept", "completed"),
        (False, "", "expired"),
        (False, "", "client_left"),
    ]:
        regret.judge(promise, outcome, shed=shed)

    assert regret.verdicts == Verdicts(shed=2, shed_but_met=1, admitted=3, admitted_but_missed=1)
