"""A hub's files on disk, laid out as `huggingface_hub` lays them out, so that either may fill the folder for the other.

`models--ORG--NAME/` holds `blobs/` (content by checksum), `snapshots/COMMIT/` (names that point to it) and `refs/`
(revision to commit). Ours beside them: `.sluice/COMMIT.json`, what the hub listed; `.sluice/CHECKSUM.right`, a blob
whose content was compared; and `blobs/CHECKSUM.part`, a download that goes on there. Knows no network. Next: `hub.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from sluice_engine import codec
from sluice_engine.errors import InvalidConfig
from sluice_engine.model_files.hub_files import Checksum, HubFile, HubListing

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_READ_BYTES = 1 << 20


def is_commit(revision: str) -> bool:
    """Whether a revision names one commit for ever, as no branch and no tag does."""
    return _COMMIT.fullmatch(revision) is not None


class HubCache:
    """One repository's part of a cache folder. Methods raise OSError where the folder cannot be read or written."""

    def __init__(self, root: Path, repository: str) -> None:
        self.root = root
        self._folder = root / f"models--{repository.replace('/', '--')}"
        self._ours = self._folder / ".sluice"

    def snapshot(self, commit: str) -> Path:
        """The folder with the names of a commit's files."""
        return self._folder / "snapshots" / commit

    def part(self, file: HubFile) -> Path:
        """Where a file is downloaded to; what is there already is its beginning."""
        return self._folder / "blobs" / f"{file.checksum}.part"

    def lock(self, file: HubFile) -> Path:
        """Held by whoever downloads the file."""
        return self.root / ".locks" / self._folder.name / f"{file.checksum}.lock"

    def make_folders(self, commit: str, file: HubFile) -> None:
        """Make whatever a download writes into."""
        for path in (self.part(file), self.lock(file), self.snapshot(commit) / file.name, self._ours / "x"):
            path.parent.mkdir(parents=True, exist_ok=True)

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision was when it was last downloaded whole."""
        if is_commit(revision):
            return revision
        with contextlib.suppress(OSError, ValueError):
            commit = (self._folder / "refs" / revision).read_text(encoding="utf-8").strip()
            return commit if is_commit(commit) else None
        return None

    def listing(self, commit: str) -> HubListing | None:
        """What the hub listed of a commit; without that, what lies in its snapshot; None without either."""
        with contextlib.suppress(OSError, InvalidConfig):
            return codec.from_json(HubListing, (self._ours / f"{commit}.json").read_bytes(), commit)
        snapshot = self.snapshot(commit)
        paths = sorted(path for path in snapshot.rglob("*") if path.is_file()) if snapshot.is_dir() else []
        files = tuple(
            HubFile(name=str(path.relative_to(snapshot)), size_bytes=path.stat().st_size, checksum=_blob_checksum(path))
            for path in paths
        )
        return HubListing(commit=commit, files=files) if files else None

    def keep_listing(self, listing: HubListing) -> None:
        """Remember what the hub listed."""
        self._ours.mkdir(parents=True, exist_ok=True)
        _write(self._ours / f"{listing.commit}.json", codec.to_json(listing))

    def keep_ref(self, revision: str, commit: str) -> None:
        """Remember which commit a revision is, now that all of its files are here."""
        if not is_commit(revision):
            path = self._folder / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, commit)

    def has(self, commit: str, file: HubFile) -> bool:
        """Whether a file is here with its right content, which is read once and remembered."""
        path = self._find(commit, file)
        if path is None or path.stat().st_size != file.size_bytes:
            return False
        if not file.checksum or self._right(file).exists():
            return True
        checksum = Checksum(file)
        with path.open("rb") as opened:
            while content := opened.read(_READ_BYTES):
                checksum.add(content)
        if checksum.is_right:
            with contextlib.suppress(OSError):  # a folder that cannot be written is read again at the next start
                self._ours.mkdir(parents=True, exist_ok=True)
                self._right(file).touch()
        return checksum.is_right

    def link(self, commit: str, file: HubFile) -> None:
        """Give a blob that is here its name in the commit's snapshot."""
        name, blob = self.snapshot(commit) / file.name, self._blob(file)
        if name.exists() or not blob.exists():
            return
        name.unlink(missing_ok=True)  # a link to what is gone
        try:
            name.symlink_to(os.path.relpath(blob, name.parent))
        except OSError:  # a file system without links
            blob.replace(name)

    def place(self, commit: str, file: HubFile) -> None:
        """A download that is whole and right becomes the file."""
        self.part(file).replace(self._blob(file))
        self._right(file).touch()
        self.link(commit, file)

    def forget(self, commit: str, file: HubFile) -> None:
        """Remove content that is wrong."""
        self._right(file).unlink(missing_ok=True)
        self._blob(file).unlink(missing_ok=True)
        (self.snapshot(commit) / file.name).unlink(missing_ok=True)

    def _find(self, commit: str, file: HubFile) -> Path | None:
        for path in (self.snapshot(commit) / file.name, self._blob(file)):
            if path.is_file():
                return path
        return None

    def _blob(self, file: HubFile) -> Path:
        return self._folder / "blobs" / (file.checksum or "-")

    def _right(self, file: HubFile) -> Path:
        return self._ours / f"{file.checksum}.right"


def _blob_checksum(path: Path) -> str:
    """What the content's own name says that it is; empty for a plain file."""
    name = path.resolve().name if path.is_symlink() else ""
    return name if _CHECKSUM.fullmatch(name) else ""


def _write(path: Path, text: str) -> None:
    """Whole or not at all, also beside others who do the same."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
