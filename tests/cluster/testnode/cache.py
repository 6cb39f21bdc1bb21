"""The user's cache: what is slow to build, kept under a digest of what it is built from.

It owns the layout of the cache, the locks and the renames that make an entry appear whole or not at all. It must not
know how anything is built.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Another checkout's run may still use what it took out of the cache this long ago.
_IN_USE_S = 3600


def folder() -> Path:
    """Where everything that is built once is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "sluice" / "testnode"


def digest(paths: Iterable[Path], *, words: Iterable[str] = ()) -> str:
    """A short name for the contents of files and folders, and for words that matter beside them."""
    total = hashlib.sha256()
    for word in words:
        total.update(f"{word}\0".encode())
    for path in paths:
        files = sorted(_sources(path)) if path.is_dir() else [path]
        for file in files:
            name = file.relative_to(path.parent)
            total.update(f"{name}\0{file.stat().st_mode & 0o111}\0".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def _sources(tree: Path) -> Iterator[Path]:
    for file in tree.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and not any(p.endswith(".egg-info") for p in file.parts):
            yield file


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Holds the one lock of a path, across processes; freed by the kernel when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{path.name}: waiting for another run that is at it", file=sys.stderr, flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def ensure(kind: str, key: str, make: Callable[[Path], None], *, keep: int = 2) -> Path:
    """The entry of that kind and key, made in a temporary folder and renamed when it is whole.

    Of its kind the `keep` entries used last stay, and all used within the hour, since a run beside this one may use
    another; older ones go.
    """
    entry = folder() / kind / key
    with lock(folder() / kind):
        if not entry.is_dir():
            made = entry.with_name(f"{key}.part")
            shutil.rmtree(made, ignore_errors=True)  # what an interrupted run left
            made.mkdir(parents=True)
            make(made)
            made.rename(entry)
            others = sorted(entry.parent.iterdir(), key=lambda other: other.stat().st_mtime, reverse=True)
            for old in [other for other in others if other != entry][keep - 1 :]:
                if time.time() - old.stat().st_mtime < _IN_USE_S:
                    continue
                shutil.rmtree(old, ignore_errors=True)
        os.utime(entry)
    return entry
