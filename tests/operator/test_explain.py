"""`sluice explain`: the life that is read from records, and the words for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recorded_scene import STEP_US, chunk, decision, document, finished, lost, recorded, running, share, state, step
from sluice_operator.cli import main
from sluice_operator.records.life import Life
from sluice_operator.records.reconstruct import life_of
from sluice_operator.records.source import Records, records
from sluice_operator.records.story import tell
from sluice_operator.records.times import clock, span

A, B = "req-a/0", "req-b/0"


def life(records: Records, name: str = "req-a") -> Life:
    found = life_of(records, name)
    assert found is not None
    return found


def served() -> Records:
    """A comes at 0.95 s, waits a step, is prefilled in three chunks beside B's decodes, then decodes three tokens."""
    return recorded(
        step(8, share(B, 199), waiting_reasons={"no_free_blocks": 1}),
        step(9, share(B, 200), waiting_reasons={"no_free_slots": 1}),
        step(10, share(B, 201), waiting_reasons={"budget_exhausted": 1}),
        step(11, share(B, 202), chunk(A, 0, 40, slot=1), prefill_left=0),
        step(12, share(B, 203), chunk(A, 40, 40, slot=1), tokens_left=0),
        step(13, share(B, 204), chunk(A, 80, 20, slot=1, last=True)),
        step(14, share(A, 100, slot=1), real_us=60_000),
        step(15, share(A, 101, slot=1), share("req-c/0", 0, 500, slot=2), real_us=STEP_US),
        step(16, share(A, 102, slot=1), start_us=18 * STEP_US),
        of=state(ended=[finished("req-a")]),
        decisions=[
            decision(
                "req-a",
                950_000,
                client_id="mine",
                inside=1,
                sequences=4,
                predicted_ttft_us=400_000,
                promised_ttft_us=2_000_000,
                predicted_peak_blocks=20,
                ceiling_blocks=95,
                first_token_us=1_400_500,
                ended_us=1_901_000,
                outcome="completed",
                promise="itl_missed",
                output_tokens=4,
                gaps=3,
                gaps_over=1,
                longest_gap_us=301_000,
            )
        ],
    )


def test_a_life_has_its_wait_its_chunks_its_first_token_and_its_gaps() -> None:
    (choice,) = life(served()).choices

    (wait,) = choice.waits
    assert (wait.from_us, wait.until_us, wait.steps) == (950_000, 1_100_000, 2)
    assert wait.held_by == {"no_free_slots": 1, "budget_exhausted": 1}
    assert [(one.step, one.start, one.num_tokens, one.reason) for one in choice.chunks] == [
        (11, 0, 40, "prefill_budget"),
        (12, 40, 40, "token_budget"),
        (13, 80, 20, "rest"),
    ]
    assert (choice.first_token_step, choice.first_token_us, choice.decode_steps) == (13, 1_400_000, 3)
    gaps = choice.gaps
    assert gaps is not None
    assert (gaps.number, gaps.p50_us, gaps.longest_us, gaps.longest_step) == (3, 140_000, 300_000, 16)
    assert gaps.over == 1
    assert (choice.status, choice.slot, choice.is_cut, choice.cached_tokens) == ("length", 1, False, 0)
    assert (choice.least_beside, choice.most_beside, dict(choice.neighbours)) == (0, 1, {B: 3, "req-c/0": 1})


def test_what_the_gate_reckoned_with_is_told_where_it_is_less_than_what_was_asked_for() -> None:
    asked = decision("req-a", 950_000, cached_tokens=64, expected_tokens=12, max_tokens=50)
    text = "\n".join(tell(life(recorded(step(8, share(B, 199)), decisions=[asked]))))

    assert "About 12 output tokens were expected, by the tenant's earlier answers." in text
    assert "64 of its prompt tokens were expected to be computed already." in text
    assert "were expected" not in "\n".join(tell(life(served())))


def test_it_is_told_in_sentences() -> None:
    text = "\n".join(tell(life(served())))

    for words in (
        "req-a (the client calls it mine)",
        "1 was inside of the 4 that may run at once; the KV blocks were predicted to peak at 20 of the 95",
        "the first token was predicted after 400 ms, 2.00 s is promised.",
        "In the engine's queue it waited 150 ms, while 2 steps ran: no slot was free (in 1 step)",
        "100 tokens of prefill were computed in 3 chunks:",
        "step 11 at +0.150 s: 40 tokens, beside 1 decode; took 100 ms, predicted 100 ms",
        "; 40 is all that such a step may prefill within the promise.",
        "step 12 at +0.250 s: 40 tokens from 40 on, beside 1 decode; took 100 ms, predicted 100 ms",
        "; the step's token budget was spent.",
        "step 13 at +0.350 s: 20 tokens from 80 on",
        "all that was left of it.",
        "Its first token came of step 13, after 450 ms: within the 2.00 s that are promised.",
        "Between its tokens lay 140 ms (median), 300 ms (p99), at most 300 ms, before step 16",
        "; 150 ms is promised, 1 of 3 gaps was longer.",
        "It ran beside 0 to 1 others, most with req-b (3 steps), req-c (1 steps).",
        "It ended 951 ms after it came: the answer was complete with 4 output tokens.",
        "At the door its client saw 3 gaps, the longest 301 ms, 1 of them over the promise.",
        "The promise was missed between tokens.",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("prices", "back_at", "words", "decodes"),
    [
        pytest.param(
            {},
            chunk(A, 0, 102, last=True),
            "computing it again is priced at 240 ms; to be recomputed.",
            1,
            id="recomputed-from-nothing",
        ),
        pytest.param(
            {"swap_us": 50_000, "choice": "swap", "reason": "cheaper"},
            share(A, 101),
            "priced at 240 ms, moving it to the host and back at 50 ms; to be swapped (the cheaper).",
            2,
            id="swapped-and-goes-on",
        ),
        pytest.param(
            {"price": {"recompute_us": 9_000, "swap_us": None, "choice": "recompute", "reason": "no_host_pool"}},
            chunk(A, 0, 102, last=True),
            "priced at 9.0 ms; to be recomputed (there is no host pool to swap to).",
            1,
            id="prices-in-an-object-of-their-own",
        ),
    ],
)
def test_a_preemption_tells_both_prices_and_when_it_came_back(
    prices: dict[str, Any], back_at: dict[str, Any], words: str, decodes: int
) -> None:
    records = recorded(
        step(1, chunk(A, 0, 100, last=True)),
        step(2, share(A, 100)),
        step(3, share(B, 300), preempted=[lost(A, 101, B, **prices)]),
        step(4, share(B, 301), held_back=[{"request_id": A, "reason": "entry_latched"}], waiting_reasons={"x": 1}),
        step(5, back_at),
        decisions=[decision("req-a", STEP_US)],
    )

    (choice,) = life(records).choices
    text = "\n".join(tell(life(records)))

    (suspension,) = choice.suspensions
    assert (suspension.step, suspension.resumed_step, suspension.beneficiary_id) == (3, 5, B)
    assert words in text
    assert "In step 3 at +0.200 s it was preempted for req-b and gave up 7 blocks with 101 tokens" in text
    assert "It came back in step 5, 200 ms later." in text
    assert "Meanwhile entry was shut after a preemption (in 1 step)." in text
    assert "at most 300 ms, before step 5, it was preempted in between" in text
    assert choice.decode_steps == decodes


def test_one_that_gave_way_to_itself_says_so_and_a_swap_repeats_nothing() -> None:
    swapped = lost(A, 101, A, swap_us=9_000, choice="swap", reason="cheaper")
    records = recorded(
        step(1, chunk(A, 0, 60), prefill_left=0),
        step(2, chunk(A, 60, 40, last=True)),
        step(3, share(B, 300), preempted=[swapped]),
        step(4, share(A, 101)),
    )

    text = "\n".join(tell(life(records)))

    assert "it stepped back itself for want of a block and gave up 7 blocks" in text
    assert "100 tokens of prefill were computed in 2 chunks:" in text
    assert "60 is all that a step may compute." in text, "nothing decodes beside it: the promise does not bind"


def test_a_refusal_is_told_with_its_reason_and_when_to_come_back() -> None:
    refused = decision(
        "req-a",
        0,
        verdict="refused",
        outcome="refused",
        reason="slots",
        message="The model is busy: 4 of 4 slots are taken.",
        retry_after_us=3_200_000,
        decided_us=400_000,
        ended_us=400_000,
        held_by="slots",
        held_because="4 of 4 slots are taken",
        inside=4,
        sequences=4,
    )

    text = "\n".join(tell(life(recorded(decisions=[refused]))))

    assert "It waited at the door for 400 ms: 4 of 4 slots are taken (slots)." in text
    assert 'The gate refused it (slots): "The model is busy: 4 of 4 slots are taken." It was told to come back' in text
    assert "in 3.20 s" in text
    assert "It ended" not in text


def test_what_a_gate_that_only_observes_would_have_refused_is_told() -> None:
    observed = decision(
        "req-a", 0, attempt=2, verdict="admitted", outcome="completed", decided_us=10, ended_us=400_000,
        shed_by="slots", held_by="slots", held_because="4 of 4 slots are taken", inside=4, sequences=4,
    )  # fmt: skip

    text = "\n".join(tell(life(recorded(decisions=[observed]))))

    assert "Its caller had tried 2 times before." in text
    assert "Under Enforce it would have been refused (slots): 4 of 4 slots are taken; admission.mode is" in text
    assert "It waited at the door" not in text


def test_the_clients_own_id_finds_its_last_attempt_and_names_the_others() -> None:
    attempts = [decision(f"req-{n}", n, client_id="mine", verdict="refused") for n in (1, 2, 3)]

    found = life(recorded(decisions=attempts), "mine")

    assert (found.request_id, found.same_client_id) == ("req-3", ("req-1", "req-2"))
    assert "the client sent this id before, as req-1, req-2" in tell(found)[0]


def test_the_title_tells_how_long_ago_it_came() -> None:
    assert tell(life(served()), 12_950_000)[0] == "req-a (the client calls it mine), came 12.0 s ago"


def test_choices_of_one_call_are_told_apart_and_one_can_be_asked_for() -> None:
    records = recorded(
        step(1, chunk("req-a/0", 0, 10, last=True), chunk("req-a/1", 0, 10, slot=1, last=True)),
        step(2, share("req-a/10", 0, 10), share("req-a/1", 10, slot=1)),
        decisions=[decision("req-a", 0, choices=11)],
    )

    assert [one.request_id for one in life(records).choices] == ["req-a/0", "req-a/1", "req-a/10"]
    assert [one.request_id for one in life(records, "req-a/1").choices] == ["req-a/1"]
    assert life_of(records, "req-a/7") is None
    assert "Choice 10:" in tell(life(records))


def test_a_beginning_that_the_ring_has_forgotten_is_said() -> None:
    records = recorded(step(500, share(A, 300)), step(501, share(A, 301)), decisions=[decision("req-a", 1)])

    (choice,) = life(records).choices

    assert choice.is_cut
    assert choice.first_token_us is None, "the first token that is seen is not the first"
    assert choice.cached_tokens == 0
    assert "The engine's records begin at step 500: what was before is not known." in tell(life(records))


def test_tokens_from_the_prefix_cache_are_told() -> None:
    records = recorded(step(1, chunk(A, 64, 36, last=True)), decisions=[decision("req-a", STEP_US)])

    assert "64 tokens of its prompt were in the prefix cache." in tell(life(records))


@pytest.mark.parametrize(
    ("request_state", "words"),
    [
        pytest.param(running("req-a", computed=120), "It still runs, with 20 output tokens so far.", id="running"),
        pytest.param(running("req-a", computed=0, status="waiting"), "It still waits in the engine", id="waiting"),
    ],
)
def test_what_has_not_ended_says_where_it_is(request_state: Any, words: str) -> None:
    text = "\n".join(tell(life(recorded(of=state(request_state), decisions=[decision("req-a", 5)]))))

    assert words in text
    assert "It ended" not in text


def test_without_the_gates_memory_the_engines_is_told() -> None:
    records = recorded(step(1, chunk(A, 0, 30, last=True)), step(2, share(A, 30)))

    lines = tell(life(records))

    assert lines[1] == "The gate has forgotten it, so what was decided at the door is not known."
    assert "Its first token came of step 1, after 100 ms." in lines


def test_a_record_without_the_gates_decisions_tells_the_wait_and_the_end() -> None:
    ended = {
        "request_id": A,
        "outcome": "stop",
        "prompt_tokens": 30,
        "output_tokens": 2,
        "max_tokens": 9,
        "priority": 4,
        "tenant": "",
        "arrival_us": 4 * STEP_US,
        "queued_us": 4 * STEP_US,
        "queued_step": 4,
        "first_token_us": 6 * STEP_US,
        "ended_us": 7 * STEP_US,
        "ended_step": 6,
    }
    content = document(step(4, share(B, 50)), step(5, chunk(A, 0, 30, last=True)), step(6, share(A, 30)))

    lines = tell(life(records({**content, "requests": [ended]}, "test")))

    assert "In the engine's queue it waited 100 ms, while 1 step ran." in lines
    assert "Its first token came of step 5, after 200 ms." in lines
    assert "The model ended it, after 2 output tokens." in lines


def test_an_empty_name_is_nobodys() -> None:
    assert life_of(recorded(decisions=[decision("req-1", 1, client_id="")]), "") is None


def test_nobody_knows_a_stranger() -> None:
    assert life_of(served(), "req-z") is None
    assert life_of(recorded(), "req-a") is None
    assert life_of(served(), "") is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "records.json"
    path.write_text(json.dumps(document(step(1, chunk(A, 0, 30, last=True)), decisions=[decision("req-a", 0)])))
    return path


def test_the_command_tells_or_says_no(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", str(file), "req-a"]) == 0
    assert capsys.readouterr().out.startswith("req-a\nIt came to /v1/chat/completions")

    assert main.run(["explain", str(file), "req-z"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "sluice: no request req-z among the last 1 decisions of the gate and steps 1 to 1 of the engine\n"
    )


def test_the_command_writes_one_document(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", str(file), "req-a", "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["request_id"] == "req-a"
    assert document["choices"][0]["chunks"][0]["reason"] == "rest"
    assert document["decision"]["verdict"] == "admitted"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("{", "is not JSON", id="no-json"),
        pytest.param("[]", "there is no list of steps in it", id="a-list"),
        pytest.param('{"steps": {}}', "there is no list of steps in it", id="steps-no-list"),
        pytest.param('{"steps": [1]}', "steps[0] is no step record", id="a-step-that-is-a-number"),
        pytest.param('{"steps": [{}]}', "steps[0].start_us is missing", id="an-empty-step"),
        pytest.param(
            json.dumps({"steps": [step(2), step(1)]}), "steps[1].step is 1, after 2: not in order", id="out-of-order"
        ),
        pytest.param(
            json.dumps({"steps": [step(1, real_us=-1)]}),
            "steps[0] is no step record: a time is negative",
            id="negative",
        ),
        pytest.param(
            json.dumps({"steps": [step(1, share(A, 0) | {"slot": "x"})]}), "steps[0] is no step record", id="a-bad-slot"
        ),
        pytest.param('{"steps": [], "decisions": [{}]}', "decisions[0].request_id: is missing", id="no-decision"),
        pytest.param('{"steps": [], "state": {}}', "state.schema_version: is missing", id="no-state"),
    ],
)
def test_a_file_that_holds_no_records_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    path = tmp_path / "records.json"
    path.write_text(content)

    assert main.run(["explain", str(path), "req-a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sluice: {path}")
    assert says in line


@pytest.mark.parametrize(
    ("where", "says"),
    [
        pytest.param("nofile.json", "nofile.json cannot be read: No such file or directory", id="no-such-file"),
        pytest.param("ftp://pod:9090", "is no URL of a gate's admin port", id="another-scheme"),
        pytest.param("http://", "is no URL of a gate's admin port", id="no-host"),
        pytest.param("http://pod:port", "is no URL", id="no-port"),
        pytest.param("http://pod:9090/state", "give the admin port alone, such as http://pod:9090", id="with-a-path"),
        pytest.param("http://127.0.0.1:1", "does not answer: Connection refused", id="nobody-there"),
    ],
)
def test_a_source_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str], where: str, says: str) -> None:
    assert main.run(["explain", where, "req-a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0 µs"),
        (999, "999 µs"),
        (1_500, "1.5 ms"),
        (240_000, "240 ms"),
        (1_234_567, "1.23 s"),
        (12_345_678, "12.3 s"),
    ],
)
def test_times_are_said_as_people_say_them(us: int, text: str) -> None:
    assert span(us) == text
    assert clock(us) == f"+{us / 1e6:.3f} s"
