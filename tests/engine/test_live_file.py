"""`live.json` on disk: swapped by links as a kubelet does it, broken, gone, and good again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mounted import Mounted
from sluice_engine.errors import InvalidConfig
from sluice_engine.live_config import LiveConfig
from sluice_engine.live_file import live_file
from sluice_engine.watched import MOST_BYTES


def document(itl_us: int = 150_000, **more: object) -> str:
    return json.dumps({"slo": {"time_to_first_token_us": 2_000_000, "inter_token_latency_us": itl_us}, **more})


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "live", {"live.json": document()})


def path(mounted: Mounted) -> str:
    return str(mounted.folder / "live.json")


def test_a_swapped_file_is_handed_on_once(mounted: Mounted) -> None:
    file = live_file(path(mounted))
    assert file.load().slo.inter_token_latency_us == 150_000
    assert file.changed() is None

    mounted.swap({"live.json": document(100_000)})

    live = file.changed()
    assert live is not None
    assert live.slo.inter_token_latency_us == 100_000
    assert file.changed() is None
    assert (file.applied_total, file.refused_total, file.problem) == (1, 0, "")


def test_another_way_of_writing_the_same_is_no_change(mounted: Mounted) -> None:
    file = live_file(path(mounted))
    file.load()

    mounted.swap({"live.json": document() + "\n"})

    assert file.changed() is None
    assert file.applied_total == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("{", "live.json: is not JSON", id="cut off"),
        pytest.param(None, "cannot be read: No such file", id="gone"),
        pytest.param(document(0), "slo.inter_token_latency_us: must be positive", id="out of range"),
        pytest.param(document(admission={"wishes": 1}), "live.json.admission.wishes: is not a known", id="unknown key"),
        pytest.param(b"\xff\xfe", "is not JSON", id="not text"),
        pytest.param("[" * 100_000, "live.json: is not JSON: ", id="nested without an end"),
        pytest.param(b"9" * 5_000, "live.json: is not JSON: ", id="a number without an end"),
        pytest.param(b" " * (MOST_BYTES + 1), "cannot be read: holds more than 1048576 bytes", id="too large"),
    ],
)
def test_a_bad_file_changes_nothing_and_is_told_once_until_a_good_one_is_there(
    mounted: Mounted, caplog: pytest.LogCaptureFixture, content: str | bytes | None, says: str
) -> None:
    caplog.set_level(logging.INFO)
    file = live_file(path(mounted))
    file.load()

    mounted.swap({} if content is None else {"live.json": content})

    assert [file.changed() for _ in range(3)] == [None] * 3
    assert says in file.problem
    assert (file.applied_total, file.refused_total) == (0, 1)
    (told,) = caplog.records
    assert told.message == "configuration refused, the old one stays"

    mounted.swap({"live.json": document()})
    assert file.changed() is None, "it is what has been in force all the time"
    assert file.problem == ""

    mounted.swap({"live.json": document(90_000)})
    assert file.changed() is not None
    assert (file.applied_total, file.refused_total) == (1, 1)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_an_end(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    there = tmp_path / "live.json"
    there.write_text(document())
    file = live_file(str(there))
    file.load()
    there.unlink()
    make(there)

    assert file.changed() is None
    assert "cannot be read: " in file.problem


def test_without_a_good_one_at_the_start_there_is_none_to_fall_back_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        live_file(str(tmp_path / "live.json")).load()


async def test_changes_are_followed_while_the_loop_runs(mounted: Mounted) -> None:
    file = live_file(path(mounted))
    file.load()
    changes: asyncio.Queue[LiveConfig] = asyncio.Queue()
    task = asyncio.create_task(file.follow(changes.put_nowait, every_s=0))

    for itl_us in (140_000, 130_000):
        mounted.swap({"live.json": document(itl_us)})
        async with asyncio.timeout(30):
            assert (await changes.get()).slo.inter_token_latency_us == itl_us
    task.cancel()
