"""The release of an earlier commit, as somebody has it installed: its chart, and images that run its sources."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from cluster.service.release import PARTS
from cluster.testnode import images, layout

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {"operator": "sluice_operator", "engine_image": "sluice_engine", "sidecar": "sluice_sidecar"}
SITE = "opt/sluice/lib/python3.11/site-packages"  # of the images' own environment
DEFINITION = "crds/inferenceservices.sluice.dev.yaml"


class Absent(Exception):
    """The commit is not in this checkout, as in a shallow clone; the text is git's own."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a commit held, in a folder."""

    commit: str
    folder: Path

    @classmethod
    def checked_out(cls, commit: str, folder: Path) -> Earlier:
        """Take it out of the history.

        Raises:
            Absent: the history does not reach back so far.
        """
        words = ["git", "archive", commit, *SOURCES, "crds", "charts/sluice"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
        if done.returncode:
            raise Absent(f"the commit {commit} is not in this checkout: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return cls(commit, folder)

    @property
    def chart(self) -> Path:
        """Its chart."""
        return self.folder / "charts/sluice"

    @property
    def values(self) -> list[str]:
        """What makes its chart run its own images, after `bring_images`."""
        return [f"--set=images.{part}.tag={self.commit}" for part in PARTS]

    def bring_images(self) -> None:
        """Give the node its three images: today's, with the packages of then in place of today's."""
        packages = self._packages()
        made = []
        for image in images.ALL:
            place = self.folder / "layouts" / image.name
            manifest = _content(_digest(image.reference))
            reference = image.reference.replace(":dev", f":{self.commit}")
            layout.on_top(manifest, _content(manifest["config"]["digest"]), packages, place, reference)
            made.append(place)
        importing = subprocess.Popen(["ctr", "images", "import", "-"], stdin=subprocess.PIPE)
        assert importing.stdin
        with importing.stdin as stdin:
            layout.stream(made, stdin)
        assert importing.wait() == 0

    def _packages(self) -> bytes:
        """A layer in which the packages are those of then, and nothing of today's shows through."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for part, package in SOURCES.items():
                tar.addfile(tarfile.TarInfo(f"{SITE}/{package}/.wh..wh..opq"))
                tar.add(self.folder / part / "src" / package, f"{SITE}/{package}")
            tar.add(self.folder / DEFINITION, f"{SITE}/sluice_operator/{DEFINITION}")
        return archive.getvalue()


def _digest(reference: str) -> str:
    said = subprocess.run(["ctr", "images", "ls", f"name=={reference}"], capture_output=True, text=True, check=True)
    return next(word for word in said.stdout.split() if word.startswith("sha256:"))


def _content(digest: str) -> layout.Document:
    said = subprocess.run(["ctr", "content", "get", digest], capture_output=True, check=True)
    found: layout.Document = json.loads(said.stdout)
    return found
