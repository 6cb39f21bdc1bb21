"""The public trace formats, read unchanged, and every way in which a line can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice_simulator.errors import InvalidInput
from sluice_simulator.traces import Trace, TraceFormat, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319600,12,0
2023-11-17 00:00:00.0000000,110,27"""
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 3055, "input_length": 1024, "output_length": 26, "hash_ids": [46, 2353]}
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
118,ChatGPT,417,0,417,API log
118.5,ChatGPT,1360,16,1376,API log
"""


def read(tmp_path: Path, text: str, trace_format: TraceFormat) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path, trace_format)


def test_azure_times_count_from_the_first_line_in_microseconds(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE, "Azure")

    assert list(trace.times_us) == [0, 52_000, 20_576_020_040]
    assert list(trace.prompts) == [4808, 3180, 110]
    assert list(trace.outputs) == [10, 8, 27]
    assert trace.skipped == 1, "one that produced nothing had failed"
    assert list(trace.lines) == [2, 3, 5]


def test_azure_of_2024_has_an_offset(tmp_path: Path) -> None:
    text = AZURE_HEAD + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,7,5\n"

    assert list(read(tmp_path, text, "Azure").times_us) == [0, 990_070]


def test_mooncake_keeps_the_shared_heads(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE, "Mooncake")

    assert list(trace.times_us) == [0, 3_055_000]
    assert trace.heads == [(46, 47), (46, 2353)]


def test_burst_gpt_leaves_out_what_failed(tmp_path: Path) -> None:
    trace = read(tmp_path, BURST_GPT, "BurstGPT")

    assert list(trace.times_us) == [0, 40_000_000, 113_500_000]
    assert list(trace.prompts) == [472, 1087, 1360]
    assert trace.skipped == 1


AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST_HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("trace_format", "text", "problem"),
    [
        pytest.param("Azure", "TIMESTAMP,ContextTokens\n", "line 1: has no column GeneratedTokens", id="no-column"),
        pytest.param(
            "Azure", "TIMESTAMP,ContextTokens,GeneratedTokens,Mood\n", "line 1: column 'Mood' is not known", id="column"
        ),
        pytest.param("Azure", AZURE_HEAD, "holds no request", id="empty"),
        pytest.param("Azure", AZURE_HEAD + "yesterday,1,2\n", "line 2: TIMESTAMP: must be a time", id="no-time"),
        pytest.param(
            "Azure", AZURE_HEAD + "2023-11-16 18:17:03,1\n", "line 2: has 2 values, the header names 3", id="short-line"
        ),
        pytest.param(
            "Azure",
            AZURE_HEAD + "2023-11-16 18:17:03,10,2\n2023-11-16 18:17:02,10,2\n",
            "line 3: arrives before the line above",
            id="unsorted",
        ),
        pytest.param(
            "Azure",
            AZURE_HEAD + "2023-11-16 18:17:03,1000000,2\n",
            "line 2: ContextTokens: must be 1 to 999,999 tokens, not 1,000,000",
            id="a-million-tokens",
        ),
        pytest.param(
            "Azure", AZURE_HEAD + "2023-11-16 18:17:03,-4,2\n", "line 2: ContextTokens: must be 1 to", id="negative"
        ),
        pytest.param(
            "Azure",
            AZURE_HEAD + "2023-11-16 18:17:03,nan,2\n",
            "line 2: ContextTokens: must be a whole number",
            id="NaN",
        ),
        pytest.param("BurstGPT", BURST_HEAD + "NaN,x,1,2,3,x\n", "line 2: Timestamp: must be a time", id="time-NaN"),
        pytest.param("BurstGPT", BURST_HEAD + "inf,x,1,2,3,x\n", "line 2: Timestamp: must be a time", id="time-inf"),
        pytest.param("BurstGPT", BURST_HEAD + "-1,x,1,2,3,x\n", "line 2: Timestamp: must be 0 to", id="time-negative"),
        pytest.param(
            "BurstGPT", BURST_HEAD + '1,"x,1,2,3,x\n', "is not such a file: unexpected end", id="broken-quotes"
        ),
        pytest.param("Mooncake", "{\n", "line 1: is not JSON", id="no-JSON"),
        pytest.param("Mooncake", "[]\n", "line 1: must be an object, not a list", id="a-list"),
        pytest.param(
            "Mooncake",
            '{"timestamp": 0, "input_length": 7, "output_length": 5, "hash_ids": [], "mood": 1}',
            "line 1: mood: is not a known key",
            id="unknown-key",
        ),
        pytest.param(
            "Mooncake",
            '{"timestamp": 0, "input_length": 7, "output_length": 5}',
            "line 1: hash_ids: is missing",
            id="key",
        ),
        pytest.param(
            "Mooncake",
            '{"timestamp": NaN, "input_length": 7, "output_length": 5, "hash_ids": []}',
            "line 1: timestamp: must be a time",
            id="Mooncake-NaN",
        ),
        pytest.param(
            "Mooncake",
            '{"timestamp": 0, "input_length": 7, "output_length": true, "hash_ids": []}',
            "line 1: output_length: must be a whole number",
            id="a-truth-value",
        ),
        pytest.param(
            "Mooncake",
            '{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [1, 2]}',
            "line 1: hash_ids: 2 ids of 512 tokens for 512 tokens",
            id="more-heads-than-prompt",
        ),
    ],
)
def test_a_broken_line_is_refused_with_its_number(
    tmp_path: Path, trace_format: TraceFormat, text: str, problem: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        read(tmp_path, text, trace_format)

    assert str(raised.value).startswith(f"{tmp_path / 'trace'}: {problem}")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file or directory"):
        read_trace(tmp_path / "none.csv", "Azure")
