"""A ConfigMap's or Secret's volume as a kubelet lays it out: files are links into `..data`, which is swapped whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Mounted:
    """One volume."""

    def __init__(self, folder: Path, files: Mapping[str, str | bytes]) -> None:
        self.folder = folder
        self._revision = 0
        folder.mkdir(exist_ok=True)
        self.swap(files)

    def swap(self, files: Mapping[str, str | bytes]) -> None:
        """Other files in their place, all at once."""
        self._revision += 1
        data = self.folder / f"..revision-{self._revision}"
        data.mkdir()
        for name, content in files.items():
            (data / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        scratch = self.folder / "..data_tmp"
        scratch.symlink_to(data.name)
        scratch.replace(self.folder / "..data")
        for link in self.folder.iterdir():
            if link.is_symlink() and not link.name.startswith("..") and link.name not in files:
                link.unlink()
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
