"""`sluice trace`: valid by the Trace Event Format, and true to the steps."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorded_scene import STEP_US, chunk, decision, document, lost, recorded, share, state, step
from sluice_operator.cli import main
from sluice_operator.records.perfetto import trace_of
from sluice_operator.records.source import Records

A, B, C = "req-a/0", "req-b/0", "req-c/0"

# The format's own rules for the phases that are used (Trace Event Format, sections "Duration", "Async", "Counter",
# "Instant", "Metadata"; JSON Object Format).
_BASE = {
    "type": "object",
    "required": ["ph", "name", "pid", "tid"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "pid": {"type": "integer", "minimum": 1},
        "tid": {"type": "integer", "minimum": 0},
        "ts": {"type": "integer", "minimum": 0},
        "dur": {"type": "integer", "minimum": 0},
        "cat": {"type": "string", "minLength": 1},
        "args": {"type": "object"},
    },
}


def _phase(phase: str, *required: str, **properties: Any) -> dict[str, Any]:
    return {"required": list(required), "properties": {"ph": {"const": phase}, **properties}}


_NUMBERS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}}
_SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "allOf": [
                    _BASE,
                    {
                        "oneOf": [
                            _phase("X", "ts", "dur", "cat"),
                            _phase("b", "ts", "cat", "id"),
                            _phase("e", "ts", "cat", "id"),
                            _phase("i", "ts", "s", s={"enum": ["g", "p", "t"]}),
                            _phase("C", "ts", "args", args=_NUMBERS),
                            _phase(
                                "M",
                                "args",
                                name={
                                    "enum": [
                                        "process_name",
                                        "process_sort_index",
                                        "thread_name",
                                        "thread_sort_index",
                                    ]
                                },
                            ),
                        ]
                    },
                ]
            },
        },
    },
}

_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, after every rule of the format that a viewer relies on."""
    trace = json.loads(json.dumps(trace))
    _VALIDATOR.validate(trace)
    events: list[dict[str, Any]] = trace["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert not timed or timed[0]["ts"] == 0
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    open_spans: Counter[tuple[str, int]] = Counter()
    for event in timed:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            open_spans[event["cat"], event["id"]] += 1 if event["ph"] == "b" else -1
            assert open_spans[event["cat"], event["id"]] in {0, 1}, "an end without its beginning, or two of them"
    assert not any(open_spans.values()), "a span is never closed"
    for slices in rows.values():
        for (_, end), (begin, _) in itertools.pairwise(slices):
            assert begin >= end, "two slices of one row overlap"
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert rows.keys() <= named, "a row without a name"
    return events


def busy() -> Records:
    return recorded(
        step(1, chunk(A, 0, 64), prefill_left=0, waiting_reasons={"budget_exhausted": 1}),
        step(2, chunk(A, 64, 36, last=True), chunk(B, 0, 20, slot=1, last=True)),
        step(3, share(A, 100), share(B, 20, slot=1)),
        step(4, share(A, 101), share(B, 21, slot=1), start_us=4 * STEP_US - 30_000),
        step(5, share(A, 102), preempted=[lost(B, 22, A)], free_blocks_after=2),
        step(6, share(A, 103), waiting_reasons={"entry_latched": 1}),
        step(7, chunk(B, 0, 23, slot=1, last=True)),
        step(9, share(B, 23, slot=1), start_us=12 * STEP_US),
        of=state(),
        decisions=[
            decision("req-a", STEP_US, decided_us=STEP_US),
            decision("req-b", STEP_US + 5, decided_us=STEP_US + 9, held_by="slots"),
            decision("req-c", STEP_US + 7, verdict="refused", held_by="slots", decided_us=STEP_US + 30),
            decision("req-old", 3),
        ],
    )


def test_a_trace_keeps_the_rules_of_the_format() -> None:
    check(trace_of(busy()))
    assert [event for event in check(trace_of(recorded())) if event["ph"] != "M"] == []


def test_each_slot_has_its_prefills_and_one_slice_for_a_run_of_decodes() -> None:
    events = check(trace_of(busy()))

    def row(slot: int) -> list[tuple[str, int, int, int]]:
        return [
            (event["name"], event["ts"], event["dur"], event["args"]["tokens"])
            for event in events
            if event["ph"] == "X" and event["tid"] == slot + 1
        ]

    assert row(0) == [
        ("prefill req-a", 0, STEP_US, 64),
        ("prefill req-a", STEP_US, STEP_US, 36),
        ("decode req-a", 2 * STEP_US, 4 * STEP_US, 4),
    ]
    assert row(1) == [
        ("prefill req-b", STEP_US, STEP_US, 20),
        ("decode req-b", 2 * STEP_US, 2 * STEP_US - 30_000, 2),
        ("prefill req-b", 6 * STEP_US, STEP_US, 23),
        ("decode req-b", 11 * STEP_US, STEP_US, 1),
    ]


def test_decodes_with_a_step_between_them_that_left_the_request_out_are_two_slices() -> None:
    events = check(trace_of(recorded(step(1, share(A, 9)), step(2, share(B, 9, slot=1)), step(3, share(A, 10)))))

    assert [event["args"]["steps"] for event in events if event["name"] == "decode req-a"] == ["1", "3"]


def test_waits_without_a_slot_have_rows_of_their_own() -> None:
    events = check(trace_of(busy()))

    spans = {(event["name"], event["ts"]) for event in events if event["ph"] == "b"}
    ends = {(event["name"], event["ts"]) for event in events if event["ph"] == "e"}

    assert spans == {
        ("waiting req-b", 9),
        ("at the door req-b", 5),
        ("at the door req-c", 7),
        ("preempted req-b", 4 * STEP_US),
    }
    assert ("waiting req-b", STEP_US) in ends
    assert ("preempted req-b", 6 * STEP_US) in ends
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert (instant["name"], instant["tid"], instant["ts"]) == ("preempted req-b", 2, 4 * STEP_US)


def test_counters_show_the_batch_the_kv_blocks_and_the_queue() -> None:
    events = check(trace_of(busy()))

    def counter(name: str) -> list[tuple[int, dict[str, int]]]:
        return [(event["ts"] // STEP_US, event["args"]) for event in events if event["name"] == name]

    assert counter("batch")[:3] == [
        (0, {"decodes": 0, "prefills": 1}),
        (1, {"decodes": 0, "prefills": 2}),
        (2, {"decodes": 2, "prefills": 0}),
    ]
    assert counter("KV blocks") == [(0, {"used": 20}), (4, {"used": 98}), (5, {"used": 20})]
    assert counter("queue") == [
        (0, {"budget_exhausted": 1, "entry_latched": 0}),
        (1, {"budget_exhausted": 0, "entry_latched": 0}),
        (5, {"budget_exhausted": 0, "entry_latched": 1}),
        (6, {"budget_exhausted": 0, "entry_latched": 0}),
    ]


def test_without_a_state_the_free_blocks_are_counted() -> None:
    events = check(trace_of(recorded(step(1, chunk(A, 0, 5)))))

    assert [event["args"] for event in events if event["name"] == "KV blocks"] == [{"free": 80}]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * STEP_US),
            st.integers(0, 2 * STEP_US),
            st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 3)), max_size=4, unique_by=lambda s: s[1]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_any_steps_make_a_valid_trace(drawn: list[tuple[int, int, list[tuple[str, int]], bool]]) -> None:
    """Steps that begin before the one before has ended, empty steps, slots that change hands, victims of any kind."""
    steps = [
        step(
            number + 1,
            *(share(name, 5, slot=slot) for name, slot in shares),
            start_us=start_us,
            real_us=real_us,
            preempted=[lost(A, 5, B)] if preempts else [],
        )
        for number, (start_us, real_us, shares, preempts) in enumerate(drawn)
    ]
    check(trace_of(recorded(*steps, decisions=[decision("req-a", 10, held_by="slots"), decision("req-z", 7)])))


def test_the_command_writes_a_file_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "records.json", tmp_path / "trace.json"
    source.write_text(json.dumps(document(step(1, chunk(A, 0, 30, last=True)))))

    assert main.run(["trace", str(source), "-o", str(target)]) == 0
    assert "steps 1 to 1; open it in ui.perfetto.dev" in capsys.readouterr().out
    written = json.loads(target.read_text())
    check(written)

    assert main.run(["trace", str(source), "-o", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["events"] == len(written["traceEvents"])
    assert main.run(["trace", str(source)]) == 0
    assert json.loads(capsys.readouterr().out) == written


@pytest.mark.parametrize(
    ("content", "target", "code", "says"),
    [
        pytest.param('{"steps": []}', "trace.json", 1, "the engine has run no step", id="no-steps"),
        pytest.param(
            json.dumps({"steps": [step(1)]}),
            "no/such/folder.json",
            2,
            "cannot be written: No such file",
            id="no-folder",
        ),
        pytest.param("x", "trace.json", 2, "is not JSON", id="no-records"),
    ],
)
def test_what_goes_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, target: str, code: int, says: str
) -> None:
    (tmp_path / "records.json").write_text(content)

    assert main.run(["trace", str(tmp_path / "records.json"), "-o", str(tmp_path / target)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
