"""Clients that leave: a fifth of them, at any moment of their request. All that they held comes back at once.

The control's gate tells the engine nothing when a client leaves: its requests run on to their end.
"""

from __future__ import annotations

from experiments.findings import Findings
from experiments.scene import CHAT_CAPACITY, NO_RETRIES, WARMUP_S, Ran, chat, ran, scene
from sluice_sidecar.telemetry.measure import percentile
from sluice_simulator.call import Call
from sluice_simulator.run import World

LOOK_US = 10_000


class Leavers:
    """Watches how long what a client held stays taken after it left."""

    def __init__(self, *, tells_engine: bool) -> None:
        self.tells_engine = tells_engine
        self.freed_us: list[int] = []
        self.windows: dict[str, int] = {"door": 0, "before the first token": 0, "in the answer": 0}

    def prepare(self, world: World) -> None:
        (replica,) = world.replicas
        leave, engine = replica.leave, replica.engine
        if not self.tells_engine:
            engine.abort = lambda request: engine._calls.pop(request.id, None)  # type: ignore[assignment,method-assign]  # noqa: SLF001

        def watched(call: Call) -> None:
            left_us, request = world.events.now_us, call.request
            where = "door" if request is None else "before the first token"
            self.windows[where if call.times.first_us is None else "in the answer"] += 1
            leave(call)
            if request is None:
                return

            def look() -> None:
                if request.id in replica.loop.scheduler.requests:
                    world.events.after(LOOK_US, look)
                else:
                    self.freed_us.append(world.events.now_us - left_us)

            look()

        replica.leave = watched  # type: ignore[method-assign]  # an experiment's


def happens(seconds: float, *, tells_engine: bool) -> tuple[Ran, Leavers]:
    """A run at 1.5 times the capacity."""
    leavers = Leavers(tells_engine=tells_engine)
    load = chat([(1.5 * CHAT_CAPACITY, 1)], abandons={"percent": 20, "within": "2s"}, retries=NO_RETRIES)
    return ran(scene([load], WARMUP_S + seconds, warmup_s=WARMUP_S), leavers.prepare), leavers


def run(*, quick: bool) -> Findings:
    """The bars of clients that leave."""
    findings = Findings()
    for tells_engine in (True, False):
        one, leavers = happens(30 if quick else 300, tells_engine=tells_engine)
        p99_s = percentile(leavers.freed_us, 99) / 1e6
        findings.data["gate" if tells_engine else "control"] = {
            **one.row(), "windows": leavers.windows, "freed_p99_s": round(p99_s, 3),
        }  # fmt: skip
        if tells_engine:
            findings.most("aborts: leaving to blocks free, p99", p99_s, "s", 1.0)
            findings.most("aborts: entries, requests and blocks left over", one.leftovers, "", 0)
        else:
            findings.bar("aborts, control that tells the engine nothing: leaving to blocks free, p99", p99_s, "s", 1.0)
    return findings
