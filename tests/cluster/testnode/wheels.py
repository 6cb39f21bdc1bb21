"""Python packages for the node, taken from the index on the host: nothing inside the box or a build can reach it."""

import shutil
import sys
from pathlib import Path

from cluster.testnode import cache, command
from cluster.testnode.errors import Missing
from cluster.testnode.progress import Progress

REQUIREMENTS = Path(__file__).parents[3] / "requirements"
FOR_IMAGES = ("build", "sidecar", "operator", "engine", "demo")
DOWNLOAD = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
PYTHON = "3.11"  # the base image's, whatever runs this


def house(progress: Progress) -> Path:
    """A folder with every wheel that the images install, torch apart."""
    files = [REQUIREMENTS / f"{name}.txt" for name in FOR_IMAGES]

    def make(made: Path) -> None:
        with progress.task("wheels", "downloading what the images install"):
            for file in files:
                words = [*DOWNLOAD, "--python-version", PYTHON, "-d", made, "-r", file]
                command.run(f"wheels-{file.stem}", [sys.executable, "-m", "pip", "download", *words])

    return cache.ensure("wheels", cache.digest(files, words=[PYTHON]), make)


def torch_folder(progress: Progress) -> Path:
    """A folder with torch and what it pulls in, and nothing else, to be mounted and put on PYTHONPATH."""
    file = REQUIREMENTS / "torch.txt"

    def make(made: Path) -> None:
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        if not uv:
            raise Missing("uv (`make setup` installs it)")
        with progress.task("torch", "laying out the folder that pods mount"):
            # Hard links from uv's own cache where that lies on the same disk: then five gigabytes cost nothing.
            words = [
                "--quiet",
                "--no-deps",
                "--require-hashes",
                "--python-version",
                PYTHON,
                "--target",
                made,
                "-r",
                file,
            ]
            command.run("torch", [uv, "pip", "install", *words])
        made.chmod(0o755)

    return cache.ensure("torch", cache.digest([file], words=[PYTHON]), make)
