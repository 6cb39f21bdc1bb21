"""Records of an engine: planned again step by step, replayed in time, changed, refused where they are broken."""

from __future__ import annotations

import copy
import http.server
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from simulator.scenes import document
from sluice_engine import codec
from sluice_engine.core.assemble import Assembled, assemble
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.plan import StepPlan, StepResult
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.state import EngineState, PoolState
from sluice_engine.core.steptime import StepTable
from sluice_operator.cli import main
from sluice_operator.rendering.files import Paths, files
from sluice_simulator import scenario
from sluice_simulator.errors import InvalidInput
from sluice_simulator.record import read_record
from sluice_simulator.retrace import retrace
from sluice_simulator.scenario import Scenario

END = 0
SERVICE = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"source": {"image": {"path": "/m"}}},
        "slo": {"timeToFirstToken": "2s", "interTokenLatency": "150ms"},
    },
}
TABLE = StepTable(
    decode_axis=(0, 1, 64),
    prefill_axis=(0, 16, 1024),
    context_axis=(0, 8192),
    median_us=(4000, 4000, 5000, 5000, 40_000, 40_000, 8000, 8000, 9000, 9000, 44_000, 44_000, 12_000, 14_000, 13_000,
               15_000, 48_000, 50_000),
    measured_on="a test",
)  # fmt: skip


class TableEngine:
    """An engine whose steps take what the table says, a little more or less."""

    def __init__(self, core: Assembled, seed: int) -> None:
        self.loop = EngineLoop(core.scheduler, self, lambda: self.now_us)
        self.now_us = 5_000_000
        self.source = random.Random(seed)

    def execute(self, plan: StepPlan) -> StepResult:
        self.now_us += round(plan.predicted_us * self.source.uniform(0.97, 1.05))
        tokens = [END if self.source.random() < 0.03 else 7 for _ in plan.sampling()]
        return StepResult(plan.step, np.array(tokens, dtype=np.int64))

    def serve(self, count: int) -> None:
        coming = sorted(self.now_us + round(self.source.uniform(0, count / 60) * 1e6) for _ in range(count))
        aborts = {f"req-{number}/0": at + 300_000 for number, at in enumerate(coming) if number % 17 == 3}
        number = 0
        while number < count or self.loop.has_work:
            if not self.loop.has_work:
                self.now_us = max(self.now_us, coming[number])
            for name in [name for name, at in aborts.items() if at <= self.now_us]:
                self.loop.abort(name)
                del aborts[name]
            while number < count and coming[number] <= self.now_us:
                self.loop.add(self._request(number, coming[number]))
                number += 1
            self.loop.step()

    def _request(self, number: int, arrival_us: int) -> Request:
        prompt = self.source.randint(1, 300)
        sampling = SamplingParams(
            max_tokens=self.source.randint(1, 60), temperature=0.0, stop_token_ids=frozenset({END})
        )
        return Request(f"req-{number}/0", [number + 1] * prompt, prompt, sampling, arrival_us, gate_id=f"req-{number}")


def machine(**changes: Any) -> Scenario:
    described = document(service=SERVICE, machine__kvCapacityTokens=1600, machine__maxLengthTokens=1024, **changes)
    described["loads"][0]["outputTokens"] = {"mean": 9, "most": 99}
    return scenario.parse(described, "small.yaml")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """What `sluice record` would have written of such an engine."""
    described = machine()
    told = files(described.spec, Paths())
    core = assemble(told.engine, told.live, TABLE, described.machine.capacity)
    engine = TableEngine(core, seed=3)
    engine.serve(300)
    state = EngineState(
        schema_version="1.1",
        boot_id="boot",
        seq=1,
        phase="ready",
        max_length_tokens=1024,
        pool=PoolState(block_tokens=16, total_blocks=100, free_blocks=100),
        table_digest=codec.digest(TABLE),
    )
    assert core.scheduler.preemptions_total > 3
    found: dict[str, Any] = json.loads(
        json.dumps(
            {
                "service": SERVICE,
                "table": codec.encode(TABLE),
                "state": {"engine": codec.encode(state)},
                "steps": codec.encode(engine.loop.trace.last(1 << 20)),
                "requests": codec.encode(list(engine.loop.ended)),
            }
        )
    )
    return found


@pytest.fixture
def record_file(recorded: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "rec.json"
    path.write_text(json.dumps(recorded))
    return path


def test_a_record_is_planned_again_step_by_step(recorded: dict[str, Any], record_file: Path) -> None:
    described = machine()
    told = files(described.spec, Paths())

    found = retrace(read_record(record_file), assemble(told.engine, told.live, TABLE, described.machine.capacity))

    assert found.difference == ""
    assert found.same == found.compared > 300
    assert any(step["preempted"] for step in recorded["steps"])
    assert {request["outcome"] for request in recorded["requests"]} == {"stop", "length", "aborted"}


def test_another_scheduler_is_found_out(record_file: Path) -> None:
    described = machine(scheduling__maxPrefillTokensPerRequest=64)
    told = files(described.spec, Paths())

    found = retrace(read_record(record_file), assemble(told.engine, told.live, TABLE, described.machine.capacity))

    assert found.same < found.compared
    assert found.difference.startswith("step ")
    assert "recorded req-" in found.difference


def test_a_record_is_replayed_and_tells_its_error(capsys: pytest.CaptureFixture[str], record_file: Path) -> None:
    assert main.run(["simulate", "--from", str(record_file), "--json"]) == 0

    compared = json.loads(capsys.readouterr().out)["replay"]
    assert compared["plans"]["same"] == compared["plans"]["compared"]
    assert compared["recorded"]["requests"] == compared["simulated"]["requests"]
    assert all(abs(error) < 15 for error in compared["error_percent"].values()), compared


def test_what_would_have_happened_is_told_beside_it(capsys: pytest.CaptureFixture[str], record_file: Path) -> None:
    assert main.run(["simulate", "--from", str(record_file), "--set", "scheduling.prefillChunkTokens=16"]) == 0
    lines = capsys.readouterr().out
    assert (
        main.run(["simulate", "--from", str(record_file), "--set", "scheduling.prefillChunkTokens=16", "--json"]) == 0
    )

    compared = json.loads(capsys.readouterr().out)["replay"]
    assert compared["changed"]["ttft_p99_ms"] > 1.2 * compared["simulated"]["ttft_p99_ms"]
    assert "changed" in lines
    assert f"{compared['plans']['compared']} recorded steps planned the same" in lines


def test_a_record_of_steps_alone_needs_a_scenario(
    capsys: pytest.CaptureFixture[str], recorded: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({key: recorded[key] for key in ("steps", "requests")}))
    small = tmp_path / "small.yaml"
    small.write_text(json.dumps(document(duration=None, machine__maxLengthTokens=1024)))

    assert main.run(["simulate", "--from", str(path)]) == 2
    assert "steps.json: holds no service: name a SCENARIO" in capsys.readouterr().err
    assert main.run(["simulate", str(small), "--from", str(path)]) == 0
    assert "300 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(lambda r: r.pop("steps"), "steps: must be a list", id="no-steps"),
        pytest.param(lambda r: r.update(requests=[]), "requests: none has ended", id="nobody-ended"),
        pytest.param(lambda r: r["steps"].reverse(), "steps[1]: comes before the step above", id="unsorted"),
        pytest.param(
            lambda r: r["steps"][0].update(real_us=-1), "steps[0].real_us: must not be negative", id="negative"
        ),
        pytest.param(
            lambda r: r["requests"][0].update(prompt_tokens=0), "prompt_tokens and max_tokens must be 1", id="no-prompt"
        ),
        pytest.param(
            lambda r: r["requests"][0].update(output_tokens=10**6),
            "output_tokens: must be 0 to",
            id="too-long-an-answer",
        ),
        pytest.param(
            lambda r: r["requests"][0].update(ended_us=1),
            "arrival_us, queued_us and ended_us must follow",
            id="deadline",
        ),
        pytest.param(
            lambda r: r["requests"][0].update(queued_us="x"), "requests[0].queued_us: must be of type int", id="a-text"
        ),
        pytest.param(lambda r: r["table"].update(median_us=[1]), "step table has 1 cells", id="broken-table"),
    ],
)
def test_a_broken_record_is_refused_in_one_line(
    recorded: dict[str, Any], tmp_path: Path, change: Any, problem: str
) -> None:
    broken = copy.deepcopy(recorded)
    change(broken)
    path = tmp_path / "rec.json"
    path.write_text(json.dumps(broken))

    with pytest.raises(InvalidInput) as raised:
        read_record(path)

    assert str(raised.value).startswith(f"{path}: ")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


class _AdminPort(http.server.BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        page = self.pages.get(self.path.partition("?")[0])
        self.send_response(200 if page is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(pages: dict[str, Any]) -> Iterator[str]:
    handler = type("Pages", (_AdminPort,), {"pages": pages})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def pages(recorded: dict[str, Any]) -> dict[str, Any]:
    return {
        "/state": recorded["state"],
        "/steps": {key: recorded[key] for key in ("steps", "requests")},
        "/step-table": {"table": recorded["table"]},
        "/decisions": {"decisions": []},
    }


@pytest.fixture
def admin_port(pages: dict[str, Any]) -> Iterator[str]:
    with answering(pages) as url:
        yield url


@pytest.mark.parametrize("own_table", [False, True])
def test_record_writes_what_from_reads(
    capsys: pytest.CaptureFixture[str],
    admin_port: str,
    recorded: dict[str, Any],
    tmp_path: Path,
    own_table: bool,  # noqa: FBT001
) -> None:
    service, table, output = tmp_path / "chat.yaml", tmp_path / "table.json", tmp_path / "out.json"
    service.write_text(json.dumps(SERVICE))
    table.write_text(codec.to_json(TABLE))
    options = ["--service", str(service), "--for", "0s", "-o", str(output)]
    if own_table:
        options += ["--table", str(table)]

    assert main.run(["record", admin_port, *options]) == 0

    assert f"{len(recorded['steps']):,} steps, 300 requests that ended" in capsys.readouterr().out
    assert main.run(["simulate", "--from", str(output)]) == 0
    assert "recorded steps planned the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "page", "says"),
    [
        pytest.param("/state", {}, "/state: does not answer as an admin port does", id="no-state"),
        pytest.param("/steps", {"steps": 5}, "steps: are no records with step", id="steps-no-list"),
        pytest.param(
            "/steps", {"steps": [{"step": [1]}]}, "steps: are no records with step", id="a-step-without-number"
        ),
        pytest.param("/steps", {"requests": [1]}, "requests: are no records with request_id", id="no-request"),
        pytest.param("/decisions", {"decisions": [{"request_id": "a"}]}, "and arrived_us", id="a-decision-of-no-time"),
    ],
)
def test_record_refuses_what_no_admin_port_says(
    capsys: pytest.CaptureFixture[str], pages: dict[str, Any], tmp_path: Path, path: str, page: Any, says: str
) -> None:
    with answering({**pages, path: page}) as url:
        assert main.run(["record", url, "--for", "0s", "-o", str(tmp_path / "x")]) == 2

    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://127.0.0.1", "nowhere"])
def test_record_says_in_one_line_that_nobody_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str
) -> None:
    assert main.run(["record", url, "--for", "0s", "-o", str(tmp_path / "x")]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"sluice: {url}")
    assert error.count("\n") == 1
