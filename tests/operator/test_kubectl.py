"""`kubectl sluice` against scripted clusters: a kubectl that answers from a file, and a gate that really listens."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import pytest

import operator_scene as scene
from sluice_engine import codec
from sluice_operator.cli.kubectl import Kubectl
from sluice_operator.cli.main import run
from sluice_operator.observed.moments import ago
from sluice_operator.status.conditions.view import condition
from sluice_operator.status.diagnosis import Evidence, diagnose, tell
from sluice_operator.status.situation import Situation
from sluice_operator.status.status import compute
from sluice_sidecar.telemetry.state import GateState, Headroom, Measured

Json = dict[str, Any]
NOW = "2026-01-01T00:10:00Z"
NO_NODE = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu."}
NO_MODEL = {
    "restartCount": 4,
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "ModelMissing: no such folder"}},
}
# Stands in for kubectl: says what the script has for these words, and forwards to the gate that the test runs.
KUBECTL = """\
#!{python}
import json, sys, time
script = json.load(open({script!r}))
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(words) + "\\n")
while words and words[0] in ("--context", "--kubeconfig", "--namespace"):
    words = words[2:]
if words[0] == "port-forward":
    if words[1] not in script["forwards"]:
        sys.exit("error: unable to forward port because pod is not running. Current status=Pending")
    print("Forwarding from 127.0.0.1:%d -> 9090" % script["forwards"][words[1]], flush=True)
    # A line for each connection: of half an hour, more than a pipe holds.
    print("Handling connection for 9090\\n" * 5000, flush=True)
    open({calls!r} + ".handled", "w").close()
    time.sleep(60)
key = " ".join(words)
if key not in script["says"]:
    sys.exit("Error from server (NotFound): " + key + " not found")
print(script["says"][key] if isinstance(script["says"][key], str) else json.dumps(script["says"][key]))
"""


class Gate:
    """An admin port on loopback that says one state after another; the last one for ever."""

    def __init__(self, *states: GateState) -> None:
        self.states = [json.dumps(codec.encode(state)).encode() for state in states]
        gate = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the library's name
                body = b'{"steps": []}'
                if self.path == "/state":
                    body = gate.states.pop(0) if len(gate.states) > 1 else gate.states[0]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        Thread(target=self.server.serve_forever, daemon=True).start()


class World:
    """What the scripted cluster holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.says: dict[str, Any] = {}
        self.forwards: dict[str, int] = {}
        self.gates: list[Gate] = []

    def service(self, *pods: Json, gates: Mapping[str, GateState] | None = None, replicas: int = 1) -> None:
        """A service with its pods, as the operator would tell of it."""
        item = service(*pods, gates=gates, replicas=replicas)
        listed = {"items": list(pods)}
        label = "sluice.dev/inferenceservice=chat"
        self.says |= {
            "get inferenceservices.sluice.dev chat -o json": item,
            "get inferenceservices.sluice.dev -o json": {"items": [item]},
            "get inferenceservices.sluice.dev --all-namespaces -o json": {"items": [item]},
            f"get pods -l {label} -o json": listed,
            f"get replicasets -l {label} -o json": {"items": []},
        }
        self.write()

    def gate(self, pod: str, *states: GateState) -> None:
        """What the gate of a pod says."""
        made = Gate(*states)
        self.gates.append(made)
        self.forwards[f"pod/{pod}"] = made.port
        self.write()

    def write(self) -> None:
        (self.folder / "script.json").write_text(json.dumps({"says": self.says, "forwards": self.forwards}))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    program = tmp_path / "kubectl"
    text = KUBECTL.format(python=sys.executable, script=str(tmp_path / "script.json"), calls=str(tmp_path / "calls"))
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    made = World(tmp_path)
    made.write()
    yield made
    for gate in made.gates:
        gate.server.shutdown()
        gate.server.server_close()


def service(*pods: Json, gates: Mapping[str, GateState] | None = None, replicas: int = 1) -> Json:
    states = {pod["metadata"]["name"]: scene.gate_state() for pod in pods} if gates is None else gates
    situation = Situation(
        generation=1,
        spec=scene.spec({"replicas": replicas}),
        observed=scene.observed(*pods),
        gates=states,
        kinds=frozenset({"PodMonitor"}),
    )
    body = scene.body({"replicas": replicas})
    return {**body, "status": compute(situation, {}, "2026-01-01T00:00:00Z")}


def event(about: Json, reason: str, message: str, **more: Any) -> Json:
    metadata = about["metadata"]
    involved = {"kind": about["kind"], "name": metadata["name"], "uid": metadata["uid"]}
    named = {"metadata": {"name": f"{metadata['name']}.1"}, "involvedObject": involved}
    told = {**named, "reason": reason, "message": message, "type": "Warning"}
    return {**told, "lastTimestamp": "2026-01-01T00:07:00Z", **more}


BROKEN = scene.pod(ready=False, engine=NO_MODEL)


def test_status_tells_of_all_services_and_ends_with_one_where_any_is_not_ready(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.service(scene.pod())
    assert run(["status"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "READY", "PODS", "OPEN", "TTFT", "ITL", "KV", "SAYS"]
    assert line.split() == ["chat", "yes", "1/1", "yes", "-", "-", "0", "%", "-"]

    world.service(BROKEN, gates={})
    assert run(["status", "-A"]) == 1
    told = capsys.readouterr().out
    assert "llm/chat  no " in told
    (line,) = [one for one in told.splitlines() if "llm/chat" in one]
    assert line.count("ModelMissing") == 1, "the message has the reason already"
    assert "0 of 1 replicas" in line


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        pytest.param(
            {"api_keys": 0}, "No API key is in force, so every request is refused with 401: the Secret", id="no key"
        ),
        pytest.param({"is_open": False}, "Every pod is busy (kv_peak); clients are told when to come back.", id="busy"),
    ],
)
def test_status_says_why_a_ready_service_lets_nobody_in(
    world: World, capsys: pytest.CaptureFixture[str], gate: Json, says: str
) -> None:
    world.service(scene.pod(), gates={"chat-new-1": scene.gate_state(**gate)})

    assert run(["status"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert (line.split()[1], line.split()[3], says in line) == ("yes", "no", True)


def test_status_of_one_service_has_its_conditions_and_json_the_whole(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.service(BROKEN, gates={})

    assert run(["status", "chat"]) == 1
    assert re.search(r"^Degraded +True +ModelMissing", capsys.readouterr().out, re.MULTILINE)
    assert run(["status", "chat", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["ready"], told["reason"], told["failure"]["reason"]) == (False, "ModelMissing", "ModelMissing")


def test_a_status_of_an_older_spec_is_no_readiness(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.service(scene.pod())
    world.says["get inferenceservices.sluice.dev -o json"]["items"][0]["metadata"]["generation"] = 2
    world.write()

    assert run(["status"]) == 1
    assert "NotObserved" in capsys.readouterr().out


def test_why_joins_what_there_is_into_one_answer(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    pods = [BROKEN, scene.pod("chat-new-2", ready=False, phase="Pending", conditions=[NO_NODE])]
    world.service(*pods, gates={}, replicas=2)
    world.says["get events -o json"] = {
        "items": [
            event(BROKEN, "BackOff", "Back-off restarting failed container", count=7),
            event(scene.pod("another"), "FailedMount", "of somebody else"),
            event(BROKEN, "Pulled", "fine", type="Normal"),
            event(BROKEN, "Unhealthy", "Readiness probe failed: statuscode: 503"),
        ]
    }
    edits = {"manager": "kubectl-edit", "fieldsV1": {"f:spec": {"f:paused": {}}}}
    edited = scene.deployment()
    edited["metadata"] |= {"namespace": "llm", "managedFields": [edits]}
    world.says[
        "get deployments.apps,services,poddisruptionbudgets.policy -l sluice.dev/inferenceservice=chat "
        "--show-managed-fields -o json"
    ] = {"items": [edited]}
    world.says["logs chat-new-1 -c engine --tail=5 --previous"] = (
        '{"message": "starting"}\nModelMissing: no such folder\n'
    )
    shut = scene.gate_state(phase="loading", is_open=False, why_shut="not_ready")
    room = Headroom(slots=3, blocks=40, tokens_per_second=None, capacity_tokens_per_second=None, class_cut="standard")
    world.gate("chat-new-1", replace(shut, headroom=room))

    assert run(["why", "chat"]) == 1

    told = capsys.readouterr().out
    assert told.splitlines()[0] == "llm/chat: is not Ready: ModelMissing: engine: no such folder (pod chat-new-1)"
    assert "→ Check spec.model.source" in told
    assert "the scheduler says: 0/3 nodes are available: 3 Insufficient gpu." in told
    assert "engine was restarted 4 times" in told
    assert "(x7): pod/chat-new-1: BackOff: Back-off restarting" in told
    assert "of somebody else" not in told
    assert "Pulled" not in told
    assert "Unhealthy" not in told, "it loads"
    assert "deployment/chat: kubectl-edit set spec.paused" in told
    assert "last lines of chat-new-1/engine" in told
    assert "ModelMissing: no such folder" in told
    assert "chat-new-1: shut: not_ready" in told
    assert "room for 3 requests and 40 KV blocks; classes down to standard are let in" in told


def test_why_says_that_all_is_well_and_ends_with_zero(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.service(scene.pod())
    world.gate("chat-new-1", scene.gate_state())

    assert run(["why", "chat", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["service"], told["is_well"], told["conditions"]) == ("llm/chat", True, [])
    assert told["headroom"] == ["chat-new-1: open; 0 inside, 0 at the door; KV 0 %"]


def test_why_does_not_doubt_the_status_for_pods_that_it_may_not_read(world: World) -> None:
    world.service(scene.pod())
    world.says = {asked: said for asked, said in world.says.items() if not asked.startswith("get pods")}
    world.write()

    assert run(["why", "chat"]) == 0


def test_why_does_without_what_cannot_be_read(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.service(BROKEN, gates={})
    for key in list(world.says):
        if not key.startswith("get inferenceservices"):
            del world.says[key]
    world.write()

    assert run(["why", "chat"]) == 1
    assert "is not Ready: ModelMissing" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "why", "top"])
def test_what_kubectl_cannot_do_is_one_line(world: World, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "nobody", *(["--once"] if command == "top" else [])]) == 2

    said = capsys.readouterr().err
    assert said.startswith("sluice: Error from server (NotFound)")
    assert said.count("\n") == 1


def test_without_kubectl_one_line_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(world.folder / "nowhere"))

    assert run(["status"]) == 2
    assert "kubectl is not found in PATH" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "status -A", "why chat"])
def test_a_cluster_without_the_chart_is_named_as_that(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    kubectl = world.folder / "kubectl"
    kubectl.write_text(
        "#!/bin/sh\necho 'error: the server doesn'\\''t have a resource type \"inferenceservices\"' >&2; exit 1\n"
    )
    monkeypatch.setenv("PATH", str(world.folder))

    assert run(command.split()) == 2
    assert "Sluice is not installed there (`helm install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said", ["", "garbage", "null", "[]", "[" * 100_000, '{"items": [null]}', '{"items": [{"metadata": 5}]}']
)
@pytest.mark.parametrize("command", ["status", "status chat", "why chat", "top chat --once"])
def test_a_kubectl_that_prints_something_else_is_one_line(
    world: World, command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.service(scene.pod())
    world.says = dict.fromkeys(world.says, said)
    world.write()

    assert run(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sluice: kubectl ")
    assert line.endswith("which program is `kubectl` in PATH?")


@pytest.mark.parametrize("program", [b"not a program", b"\x7fELF"])
def test_a_kubectl_that_is_no_program_is_one_line(
    world: World, program: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "kubectl").write_bytes(program)
    assert run(["status"]) == 2
    assert capsys.readouterr().err == "sluice: kubectl cannot be run: Exec format error\n"


@pytest.mark.parametrize("command", ["why -- --all", "why a/b", "status -- -A", "drain -- -x", "drain pod/a"])
def test_a_name_that_kubectl_would_take_for_something_else_is_refused(
    world: World, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.split()) == 2
    assert re.fullmatch(r"sluice: '.+' is no name: .*\n", capsys.readouterr().err)
    assert not (world.folder / "calls").exists()


def test_the_place_is_handed_to_kubectl(world: World) -> None:
    world.service(scene.pod())

    run(["status", "--context", "prod", "-n", "llm", "--kubeconfig", "/k"])

    assert world.calls()[0][:6] == ["--context", "prod", "--kubeconfig", "/k", "--namespace", "llm"]


def test_top_reaches_a_pod_that_serves_by_the_name_of_its_service(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.service(scene.pod("chat-a", ready=False), scene.pod("chat-b"), replicas=2)
    world.gate("chat-b", scene.gate_state())

    assert run(["top", "chat", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"]["ready"] is True
    assert run(["top", "chat", "--once", "--pod", "chat-c"]) == 2
    assert "--pod chat-c is no running pod of chat; there are chat-b, chat-a" in capsys.readouterr().err


def test_top_of_a_service_without_pods_says_where_to_look(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.service(replicas=0)

    assert run(["top", "chat", "--once"]) == 2
    assert "`kubectl sluice why chat` says why" in capsys.readouterr().err


def draining(inside: int) -> GateState:
    state = scene.gate_state()
    return replace(state, draining=True, admission=replace(state.admission, ledger_requests=inside))


def test_drain_shuts_the_gate_and_waits_for_its_streams(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_operator.cli.drain._EVERY_S", 0)
    world.says["exec chat-a -c gate -- /bin/sh -c kill -USR1 1"] = ""
    busy = replace(scene.gate_state(), admission=replace(scene.gate_state().admission, ledger_requests=0))
    # The gate has the signal and has not begun: that nothing is inside means nothing yet.
    world.gate("chat-a", busy, draining(2), draining(1), draining(0))

    assert run(["drain", "chat-a"]) == 0

    said = capsys.readouterr()
    assert "chat-a is drained" in said.out
    assert said.err.splitlines() == [
        f"chat-a: {text} inside" for text in ("0 requests", "2 requests", "1 request", "0 requests")
    ]


def test_drain_that_runs_out_of_time_says_what_is_left(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_operator.cli.drain.monotonic", iter(range(0, 1000, 10)).__next__)
    monkeypatch.setattr("sluice_operator.cli.drain._EVERY_S", 0)
    world.says["exec chat-a -c gate -- /bin/sh -c kill -USR1 1"] = ""
    world.gate("chat-a", draining(3))

    assert run(["drain", "chat-a", "--timeout", "15", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"pod": "chat-a", "drained": False, "inside": 3}


def test_a_gate_that_does_not_begin_to_drain_is_not_called_drained(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_operator.cli.drain.monotonic", iter(range(0, 1000, 10)).__next__)
    monkeypatch.setattr("sluice_operator.cli.drain._EVERY_S", 0)
    world.says["exec chat-a -c gate -- /bin/sh -c kill -USR1 1"] = ""
    world.gate("chat-a", scene.gate_state())

    assert run(["drain", "chat-a", "--timeout", "15"]) == 1
    assert "has not begun to drain after 15 s" in capsys.readouterr().err


def test_a_forward_goes_on_whatever_kubectl_writes_meanwhile(world: World) -> None:
    world.gate("chat-a", scene.gate_state())
    handled = world.folder / "calls.handled"

    with Kubectl().forwarded("chat-a"):
        deadline = monotonic() + 30
        while not handled.exists():
            assert monotonic() < deadline, "kubectl stands still: nobody reads what it writes"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["status", "chat", "-A"], "leave NAME out", id="one service of every namespace"),
        pytest.param(["top", "http://127.0.0.1:9", "--once", "--pod", "a"], "belong to a NAME", id="a pod of a URL"),
        pytest.param(["top", "127.0.0.1:9", "--once", "-n", "llm"], "belong to a NAME", id="a namespace of a URL"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    world: World, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.service(scene.pod())

    assert run(words) == 2
    assert said in capsys.readouterr().err


def test_a_pod_that_cannot_be_drained_is_one_line(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", "nobody"]) == 2
    assert "not found" in capsys.readouterr().err

    world.says["exec chat-a -c gate -- /bin/sh -c kill -USR1 1"] = ""
    world.write()
    assert run(["drain", "chat-a"]) == 2
    assert "unable to forward port because pod is not running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("item", "verdict", "is_well"),
    [
        pytest.param(scene.body(), "The operator has said nothing about it yet", False, id="no status"),
        pytest.param(
            {**service(scene.pod()), "metadata": {**scene.body()["metadata"], "generation": 2}},
            "the operator has not seen the newest change yet (generation 2, it told of 1)",
            False,
            id="an older status",
        ),
        pytest.param(service(replicas=0), "is scaled to zero.", True, id="scaled to zero"),
        pytest.param(
            service(scene.pod(), gates={"chat-new-1": scene.gate_state(is_open=False)}),
            "serves, and lets nobody in now: Busy: Every pod is busy (kv_peak)",
            False,
            id="busy",
        ),
        pytest.param(
            service(scene.pod(), gates={"chat-new-1": scene.gate_state(feasible=False, reason="too tight")}),
            "is not Ready: PromiseInfeasible",
            False,
            id="infeasible",
        ),
        pytest.param(
            service(scene.pod(), gates={"chat-new-1": scene.gate_state(api_keys=0)}),
            "serves, and lets nobody in now: NoApiKeys: No API key is in force",
            False,
            id="keys are gone",
        ),
        pytest.param(service(scene.pod(ready=False), gates={}), "is not Ready: PodsStarting", False, id="starting"),
    ],
)
def test_the_answer_comes_first(item: Json, verdict: str, *, is_well: bool) -> None:
    answer = diagnose(Evidence(service=item, pods=[scene.pod()], now=NOW))

    assert verdict in next(iter(tell(answer)))
    assert answer.is_well is is_well
    assert ("Create the Secret" in "\n".join(tell(answer))) is ("NoApiKeys" in verdict)


@pytest.mark.parametrize(
    ("mode", "rate", "said"),
    [
        pytest.param(
            "Observe", 118.0, ["preempts 118 requests a minute", "is 6", "set admission.mode: Enforce"], id="observed"
        ),
        pytest.param("Enforce", 7.0, ["preempts 7 requests a minute", "kvCeilingPercent"], id="all the same"),
        pytest.param("Enforce", 6.0, ["is well"], id="no more than is allowed"),
    ],
)
def test_a_storm_of_preemptions_is_the_answer(mode: str, rate: float, said: list[str]) -> None:
    gate = scene.gate_state(is_open=mode == "Enforce", mode=mode, measured=Measured(preemptions_per_minute=rate))
    item = service(scene.pod(), gates={"chat-new-1": gate})
    item["spec"]["admission"] = {"mode": mode, "preemptionsPerMinute": 6}

    answer = diagnose(Evidence(service=item, pods=[scene.pod()], gates={"chat-new-1": gate}, now=NOW))

    text = "\n".join(tell(answer))
    assert all(words in text for words in said)
    assert ("Enforce would refuse: kv_peak" in text) is (mode == "Observe")
    assert f"{rate:g} preemptions a minute" in text
    assert "shut" not in text


def test_a_promise_that_cannot_be_kept_is_not_well_where_it_is_only_observed() -> None:
    gates = {"chat-new-1": scene.gate_state(feasible=False, reason="an idle pod needs 279,306 ms")}
    spec = scene.spec({"slo": {**scene.body()["spec"]["slo"], "enforcement": "Observe"}})
    seen = Situation(generation=1, spec=spec, observed=scene.observed(scene.pod()), gates=gates)
    item = {**scene.body(), "status": compute(seen, {}, NOW)}

    answer = diagnose(Evidence(service=item, pods=[scene.pod()], now=NOW))

    assert condition(item["status"], "Ready")["status"] == "True"
    text = "\n".join(tell(answer))
    assert "serves, and cannot keep its promise: Pod chat-new-1: an idle pod needs 279,306 ms" in text
    assert "delete the pod: the next one measures anew" in text
    assert "Observe" not in text.split("conditions")[0], "that is set already"
    assert not answer.is_well


@pytest.mark.parametrize("pods", [[], [scene.pod(ready=False)]], ids=["no pod", "no ready pod"])
def test_a_status_that_nobody_writes_any_more_is_not_believed(pods: list[Json]) -> None:
    answer = diagnose(Evidence(service=service(scene.pod()), pods=pods, now=NOW))

    assert not answer.is_well
    assert "the status counts 1 that serve, and no pod is ready" in answer.verdict
    assert "does the operator run?" in answer.hint


@pytest.mark.parametrize(
    ("earlier", "told"),
    [
        ("2026-01-01T00:09:50Z", "10 s ago"),
        ("2026-01-01T00:05:00Z", "5 min ago"),
        ("2025-12-31T20:10:00Z", "4 h ago"),
        ("2025-12-20T00:10:00Z", "12 d ago"),
        ("", ""),
    ],
)
def test_how_long_ago(earlier: str, told: str) -> None:
    assert ago(earlier, NOW) == told
