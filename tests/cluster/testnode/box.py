"""The box: a network, mounts and a process tree of its own, in which the node runs and a command beside it.

This file is its outside: it makes the run folder, enters the namespaces, waits, and removes what stays behind. Nothing
of the box is reachable from outside it, and two can run side by side. Its inside is `boot`.
"""

import contextlib
import fcntl
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.testnode import cache
from cluster.testnode.errors import Missing

CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "sluice-node-"
INTERRUPTED_S = 10  # for a command that tidies up after Ctrl-C
GONE_WITHIN_S = 20  # for the kernel to take a whole process tree down


@dataclass(frozen=True, slots=True)
class Plan:
    """What the inside needs to know."""

    run: Path
    programs: tuple[Path, ...]
    store: Path
    torch: Path
    token: str
    dual_stack: bool = False
    """Whether node, pods and services have IPv6 addresses too."""

    def write(self) -> None:
        """Leaves the plan in the run folder, for the inside to read."""
        (self.run / "plan.json").write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, run: Path) -> "Plan":
        """The plan that the outside left."""
        found = json.loads((run / "plan.json").read_text())
        programs = tuple(map(Path, found["programs"]))
        return cls(run, programs, Path(found["store"]), Path(found["torch"]), found["token"], found["dual_stack"])


def check_machine() -> None:
    """Refuses a machine on which no box can run.

    Raises:
        Missing: naming what it lacks.
    """
    if sys.platform != "linux":
        raise Missing("Linux")
    if os.geteuid() != 0:
        raise Missing("root: namespaces, cgroups and container images need it")
    if not _cgroup_parents():
        raise Missing(f"cgroups that can be written, under {CGROUPS}")
    enter = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    if shutil.which("unshare") and subprocess.run(enter, capture_output=True, check=False).returncode:
        raise Missing(f"namespaces: `{' '.join(enter)}` fails here")


def run(
    inside: Sequence[str],
    command: Sequence[str],
    programs: Sequence[Path],
    store: Path,
    torch: Path,
    *,
    dual_stack: bool = False,
) -> int:
    """Runs a command beside a node in a new box and returns its exit code; nothing stays behind.

    Args:
        inside: how to start this project's driver in the box; the run folder and the command are appended.
    """
    _sweep()
    with _run_folder() as folder, _cgroups(folder.name):
        Plan(folder, tuple(programs), store, torch, secrets.token_hex(16), dual_stack).write()
        code = _enter([*inside, str(folder), "--", *command])
        if code:
            _keep_logs(folder)
        return code


def _enter(argv: Sequence[str]) -> int:
    # A driver that is killed takes the box with it.
    start = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork"]
    box = subprocess.Popen([*start, "--kill-child", "--mount-proc", *argv])
    first: int | None = None
    try:
        first = _first_process(box)
        return box.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            box.wait(INTERRUPTED_S)
        raise
    finally:
        box.kill()
        box.wait()
        if first is not None:
            select.select([first], [], [], GONE_WITHIN_S)
            os.close(first)


def _first_process(box: subprocess.Popen[bytes]) -> int | None:
    """A handle on the box's process 1, with which everything in it ends."""
    children = Path(f"/proc/{box.pid}/task/{box.pid}/children")
    while box.poll() is None:
        with contextlib.suppress(OSError, IndexError):  # not forked yet
            return os.pidfd_open(int(children.read_text().split()[0]))
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    folder.chmod(0o711)  # pods run as somebody else and mount folders below
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    # The mounts went with the box, so this reaches only what it wrote. Its last processes may still be closing files.
    for _ in range(GONE_WITHIN_S * 10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _cgroup_parents() -> list[Path]:
    """Each hierarchy of cgroup v1, or the one of v2."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS] if os.access(CGROUPS, os.W_OK) else []
    return [tree for tree in CGROUPS.glob("*") if (tree / "cgroup.procs").exists() and not tree.is_symlink()]


@contextlib.contextmanager
def _cgroups(name: str) -> Iterator[None]:
    """The cgroups under which this box's kubelet puts its pods: another box's kubelet would clean up shared ones."""
    for parent in _cgroup_parents():
        (parent / name).mkdir()
    try:
        yield
    finally:
        _remove_cgroups(name)


def _remove_cgroups(name: str) -> None:
    for parent in _cgroup_parents():
        root = parent / name
        deadline = time.monotonic() + GONE_WITHIN_S
        while root.exists() and time.monotonic() < deadline:
            for group in [*sorted(root.rglob("*/"), reverse=True), root]:
                with contextlib.suppress(OSError):  # still busy for a moment, or already gone
                    group.rmdir()
            time.sleep(0.05)


def _sweep() -> None:
    """Removes what a killed driver left: run folders that nobody holds, and their cgroups."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with (folder / "lock").open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_cgroups(folder.name)
                _remove(folder)
        except OSError:
            continue


def _keep_logs(folder: Path) -> None:
    kept = cache.folder() / "logs" / "last-failed-run"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, kept)
    if (folder / "podlogs").is_dir():
        shutil.copytree(folder / "podlogs", kept / "podlogs", symlinks=True)
    print(f"node: the logs of its programs and pods are in {kept}", file=sys.stderr)
