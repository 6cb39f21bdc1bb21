"""What `benchmarks/soak.py` judges by: slopes, what a process holds, and answers that are not as they have to be."""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sluice_engine.errors import RequestError
from sluice_engine.protocol.chat import parse_chat
from sluice_engine.protocol.completions import parse_completion

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

if TYPE_CHECKING:
    import soak_answers
    import soak_process
    import soak_requests
else:

    def _imported(name: str) -> Any:
        sys.path.insert(0, str(BENCHMARKS))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(BENCHMARKS))

    soak_answers, soak_process, soak_requests = map(_imported, ("soak_answers", "soak_process", "soak_requests"))

MIB = 2**20
PARSERS = {soak_requests.CHAT: parse_chat, soak_requests.TEXT: parse_completion}


def samples(per_hour: float) -> tuple[list[float], list[float]]:
    """Fifteen minutes of a process of 800 MiB that takes and gives back 10 MiB, with a spike."""
    rng = random.Random(3)
    times = [5.0 * number for number in range(180)]
    values = [800 * MIB + per_hour * at / 3600 + rng.uniform(-5, 5) * MIB for at in times]
    values[70:75] = [2 * value for value in values[70:75]]
    return times, values


def test_a_steady_process_has_no_slope_whatever_it_does_for_a_moment() -> None:
    found = soak_process.slope(*samples(0))

    assert abs(found.per_hour) < 10 * MIB
    assert found.low < 0 < found.high


def test_a_leak_shows_through_the_noise() -> None:
    found = soak_process.slope(*samples(60 * MIB))

    assert 50 * MIB < found.per_hour < 70 * MIB
    assert found.low > 0


def test_what_is_opened_started_and_run_as_a_child_is_counted() -> None:
    before = soak_process.held_by(os.getpid())
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one, other = socket.socketpair()
    try:
        after = soak_process.held_by(os.getpid())
    finally:
        one.close()
        other.close()
        ended.set()
        child.communicate(b"\n")
        thread.join()

    assert after.processes == before.processes + 1
    assert after.threads >= before.threads + 2
    assert after.descriptors["socket"] >= before.descriptors.get("socket", 0) + 2
    assert after.rss_bytes > before.rss_bytes
    with pytest.raises(ProcessLookupError):
        soak_process.held_by(child.pid)


def test_all_that_is_asked_is_what_the_engine_takes() -> None:
    rng = random.Random(1)
    asked = [soak_requests.drawn(rng) for _ in range(400)] + [soak_requests.wide(rng)]
    for one in asked:
        PARSERS[one.path](json.dumps(one.body).encode())

    assert len({one.kind for one in asked}) == 10


def test_what_is_to_be_refused_for_its_body_is_refused_by_the_parser_or_needs_the_model() -> None:
    rng = random.Random(1)
    for _ in range(300):
        method, path, body, headers, status = soak_requests.refused(rng)
        text = body.decode(errors="replace")
        if status != 400 or "guided_regex" in text or "json_schema" in text or len(body) > 10_000:
            continue  # for its head, its grammar or its length
        if json_max_tokens(text):
            continue
        with pytest.raises(RequestError):
            parse_chat(body)
        assert (method, path, headers) == ("POST", soak_requests.CHAT, {"Content-Type": "application/json"})


def json_max_tokens(text: str) -> bool:
    """Whether it asks for more than any model's length."""
    return '"max_tokens": 10000000' in text


@pytest.mark.parametrize(
    ("text", "finish_reason", "tokens", "said"),
    [
        pytest.param("", "stop", 3, "", id="as-it-has-to-be"),
        pytest.param("", "", 3, "finish_reason", id="no-reason-for-its-end"),
        pytest.param("", "stop", 9, "output tokens", id="more-tokens-than-were-asked-for"),
        pytest.param("a stop", "stop", 3, "a stop string", id="a-stop-string-in-the-text"),
    ],
)
def test_an_answer_that_is_not_well_formed_is_found(text: str, finish_reason: str, tokens: int, said: str) -> None:
    asked = soak_requests.Asked(
        kind="chat",
        path=soak_requests.CHAT,
        body={"max_tokens": 8},
        check=lambda choice: "a stop string" if "stop" in choice.text else "",
    )
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    found = asked.problems({0: soak_answers.Said(text, finish_reason)}, usage)

    assert len(found) == (1 if said else 0)
    assert all(said in problem for problem in found)
    assert asked.problems({}, usage)
