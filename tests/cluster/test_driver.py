"""The driver of the node: what it promises on any machine, without a node."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cluster.testnode import boot, cache, layout, programs
from cluster.testnode.box import Plan
from cluster.testnode.progress import Progress, elapsed

DRIVER = Path(__file__).with_name("node.py")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _interrupted(made: Path) -> None:
    (made / "half").write_text("x")
    raise KeyboardInterrupt


def test_an_interrupted_build_leaves_no_entry_and_the_next_one_starts_anew() -> None:
    with pytest.raises(KeyboardInterrupt):
        cache.ensure("kind", "key", _interrupted)
    assert not (cache.folder() / "kind" / "key").exists()
    entry = cache.ensure("kind", "key", lambda made: (made / "whole").touch())
    assert [file.name for file in entry.iterdir()] == ["whole"]


def test_what_is_cached_is_not_built_again() -> None:
    made = cache.ensure("kind", "key", lambda made: (made / "whole").touch())
    assert cache.ensure("kind", "key", _interrupted) == made


def test_only_the_entries_used_last_are_kept() -> None:
    for age, key in enumerate(("old", "older", "new")):
        made = cache.ensure("kind", key, lambda _made: None)
        os.utime(made, (age, age))
    cache.ensure("kind", "newest", lambda _made: None)
    assert {entry.name for entry in (cache.folder() / "kind").iterdir()} == {"new", "newest"}


def test_what_another_run_took_out_within_the_hour_is_kept() -> None:
    for key in ("one", "two", "three"):
        cache.ensure("kind", key, lambda _made: None)
    assert {entry.name for entry in (cache.folder() / "kind").iterdir()} == {"one", "two", "three"}


def test_a_digest_follows_contents_and_names_and_ignores_compiled_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("1")
    before = cache.digest([tree])
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "a.pyc").write_text("compiled")
    assert cache.digest([tree]) == before
    (tree / "a.py").write_text("2")
    changed = cache.digest([tree])
    (tree / "a.py").rename(tree / "b.py")
    assert len({before, changed, cache.digest([tree]), cache.digest([tree], words=["more"])}) == 4


def test_an_archive_holds_a_layer_that_two_images_share_once(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF")
    for name in ("one", "two"):
        layout.from_program(program, tmp_path / name, f"sluice.test/{name}:1")
    archive = io.BytesIO()
    layout.stream([tmp_path / "one", tmp_path / "two"], archive)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        names = tar.getnames()
        index = json.load(tar.extractfile("index.json") or io.BytesIO())
    assert len(names) == len(set(names)) == 5  # the two documents, and manifest, config and layer of both
    references = [one["annotations"]["org.opencontainers.image.ref.name"] for one in index["manifests"]]
    assert references == ["sluice.test/one:1", "sluice.test/two:1"]


@pytest.mark.parametrize(
    "module", [*programs.ALL[1:], *programs.BESIDE], ids=lambda module: f"{module.name} is pinned by both files"
)
def test_every_program_is_pinned(module: programs.Module) -> None:
    version = module.version()
    assert f"{module.package} {version} h1:" in (module.source / "go.sum").read_text()


def test_progress_into_a_file_says_start_and_outcome_a_task() -> None:
    out = io.StringIO()
    progress = Progress(out)
    with progress.task("etcd", "building"):
        pass
    with pytest.raises(ValueError, match="no"), progress.task("helm", "building"):
        raise ValueError("no")
    assert out.getvalue().splitlines() == [
        "etcd: building",
        "etcd: building: done in 0s",
        "helm: building",
        "helm: building: failed after 0s",
    ]


def test_a_program_of_the_node_that_is_killed_starts_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boot, "RESTART_AFTER_S", 0)
    node = boot.Node(Plan(tmp_path, (), tmp_path, tmp_path, "token"))
    try:
        node._spawn("sleep", "60")
        (first,) = node._started
        os.kill(first, signal.SIGKILL)
        _, status = os.waitpid(first, 0)

        assert node.restart(first, status) == "sleep"
        (second,) = node._started
        assert node._started[second].words == ("sleep", "60")
        assert node.restart(first, status) is None, "an orphan by that number is none of the node's"
    finally:
        for started in node._started.values():
            started.process.kill()
            started.process.wait()


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0s"), (59.9, "59s"), (60, "1m00s"), (605, "10m05s")])
def test_elapsed_time_reads_as_a_person_says_it(seconds: float, shown: str) -> None:
    assert elapsed(seconds) == shown


@pytest.mark.parametrize(
    ("words", "ci", "code", "said"),
    [
        pytest.param([], "", 2, "node: this machine lacks ", id="without the tools a run is a usage error"),
        pytest.param(["--or-skip"], "", 0, "node: skipped: this machine lacks ", id="unless a skip was asked for"),
        pytest.param(["--or-skip"], "true", 2, "node: this machine lacks ", id="which in CI is no way out"),
    ],
)
def test_a_machine_that_cannot_run_the_node_is_told_in_one_line(
    words: list[str], ci: str, code: int, said: str
) -> None:
    empty_path = {"PATH": "/nonexistent", "CI": ci, "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, DRIVER, *words, "run", "--", "true"],
        env=empty_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1
