"""What a program's log says of its end."""

from __future__ import annotations

import json

import pytest

from sluice_operator.local.last_words import last_words

VLLM = """(EngineCore pid=7) ERROR 11-30 17:01:48 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 17:01:48 [core.py:1510]   File "multiproc_executor.py", line 444, in get_response
(EngineCore pid=7) ERROR 11-30 17:01:48 [core.py:1510]     raise RuntimeError(
(EngineCore pid=7) ERROR 11-30 17:01:48 [core.py:1510] ValueError: To serve at least one request 4 GiB are needed
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects
  warnings.warn('resource_tracker: There appear to be %d '"""


GROUP = """  + Exception Group Traceback (most recent call last):
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    | OSError: full
    +------------------------------------"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        pytest.param("", "it said nothing", id="nothing"),
        pytest.param("one\ntwo\n", "two", id="the last line"),
        pytest.param('x\n{"message": "terminating"}', "terminating", id="a message of ours"),
        pytest.param('{"message": "no", "error": "why"}', "no: why", id="with its error"),
        pytest.param(
            json.dumps({"message": "no", "exception": GROUP}), "no: OSError: full", id="of a group its last one"
        ),
        pytest.param(VLLM, "ValueError: To serve at least one request 4 GiB are needed", id="the cause in a traceback"),
        pytest.param("Traceback (most recent call last):\n  File x", "  File x", id="a traceback cut short"),
    ],
)
def test_the_line_that_tells_most(log: str, words: str) -> None:
    assert last_words(log) == words
