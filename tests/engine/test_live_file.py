"""`live.json` on disk: swapped by links as a kubelet does it, broken, gone, and good again."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from sluice_engine.config import LiveConfig
from sluice_engine.errors import InvalidConfig
from sluice_engine.live_file import LiveFile


def document(itl_us: int = 150_000, **more: object) -> str:
    return json.dumps({"slo": {"time_to_first_token_us": 2_000_000, "inter_token_latency_us": itl_us}, **more})


class Mounted:
    """A ConfigMap's volume: the file is a link into `..data`, which is a link to a folder that is swapped whole."""

    def __init__(self, folder: Path, content: str) -> None:
        self.folder, self.path, self._revision = folder, folder / "live.json", 0
        self.swap(content)
        self.path.symlink_to("..data/live.json")

    def swap(self, content: str | None) -> None:
        self._revision += 1
        data = self.folder / f"..revision-{self._revision}"
        data.mkdir()
        if content is not None:
            (data / "live.json").write_text(content)
        scratch = self.folder / "..data_tmp"
        scratch.symlink_to(data.name)
        scratch.replace(self.folder / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path, document())


def test_a_swapped_file_is_handed_on_once(mounted: Mounted) -> None:
    file = LiveFile(str(mounted.path))
    assert file.load().slo.inter_token_latency_us == 150_000
    assert file.changed() is None

    mounted.swap(document(100_000))

    live = file.changed()
    assert live is not None
    assert live.slo.inter_token_latency_us == 100_000
    assert file.changed() is None
    assert (file.applied_total, file.refused_total, file.problem) == (1, 0, "")


def test_another_way_of_writing_the_same_is_no_change(mounted: Mounted) -> None:
    file = LiveFile(str(mounted.path))
    file.load()

    mounted.swap(document() + "\n")

    assert file.changed() is None
    assert file.applied_total == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("{", "live.json: is not JSON", id="cut off"),
        pytest.param(None, "cannot be read: No such file", id="gone"),
        pytest.param(document(0), "slo.inter_token_latency_us: must be positive", id="out of range"),
        pytest.param(document(admission={"wishes": 1}), "live.json.admission.wishes: is not a known", id="unknown key"),
        pytest.param("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "is not JSON", id="not text"),
    ],
)
def test_a_bad_file_changes_nothing_and_is_told_once_until_a_good_one_is_there(
    mounted: Mounted, caplog: pytest.LogCaptureFixture, content: str | None, says: str
) -> None:
    caplog.set_level(logging.INFO)
    file = LiveFile(str(mounted.path))
    file.load()

    mounted.swap(content)

    assert [file.changed() for _ in range(3)] == [None] * 3
    assert says in file.problem
    assert (file.applied_total, file.refused_total) == (0, 1)
    (told,) = caplog.records
    assert told.message == "live configuration refused, the old one stays"

    mounted.swap(document())
    assert file.changed() is None, "it is what has been in force all the time"
    assert file.problem == ""

    mounted.swap(document(90_000))
    assert file.changed() is not None
    assert (file.applied_total, file.refused_total) == (1, 1)


def test_without_a_good_one_at_the_start_there_is_none_to_fall_back_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        LiveFile(str(tmp_path / "live.json")).load()


async def test_changes_are_followed_while_the_loop_runs(mounted: Mounted) -> None:
    file = LiveFile(str(mounted.path))
    file.load()
    changes: asyncio.Queue[LiveConfig] = asyncio.Queue()
    task = asyncio.create_task(file.follow(changes.put_nowait, every_s=0))

    for itl_us in (140_000, 130_000):
        mounted.swap(document(itl_us))
        async with asyncio.timeout(30):
            assert (await changes.get()).slo.inter_token_latency_us == itl_us
    task.cancel()
