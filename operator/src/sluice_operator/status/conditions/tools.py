"""Reconciling and Stalled: Ready and Progressing once more, in the words that kstatus reads (Flux, kpt). Pure.

Both are there only while they are True, as kstatus wants it.
Source: kubernetes-sigs/cli-utils, pkg/kstatus/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice_operator.observed.failures import needs_an_edit
from sluice_operator.status.claim import Claim
from sluice_operator.status.conditions.view import View


def for_tools(view: View, claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """Reconciling while something is still to come; Stalled while nothing will unless somebody changes something."""
    ready, progressing = claims["Ready"], claims["Progressing"]
    if progressing.status == "True":
        return {"Reconciling": progressing}
    if ready.status != "False":
        return {}
    if needs_an_edit(ready.reason):
        return {"Stalled": Claim(status="True", reason=ready.reason, message=ready.message)}
    if view.failure and needs_an_edit(view.failure.reason):
        return {"Stalled": Claim(status="True", reason=view.failure.reason, message=view.failure.message)}
    return {}
