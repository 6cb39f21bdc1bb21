"""The images that the node runs, built without a registry: a Debian base by debootstrap, the product's own Dockerfiles
by buildah, and the pause image from one program.

It owns buildah's storage in the cache. It must not know the node that will run them.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.testnode import cache, command, layout, wheels
from cluster.testnode.progress import Progress

ROOT = Path(__file__).parents[3]
SUITE = "bookworm"  # its Python is 3.11, as in the base that a user's build takes
INCLUDE = "python3,python3-venv"
NOT_NEEDED = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
)
PAUSE = "sluice.test/pause:1"
WHEELS_AT = "/wheelhouse"


@dataclass(frozen=True, slots=True)
class Image:
    """One of the product's images and what it is made of, by paths from the root of the repository."""

    name: str
    folder: str
    sources: tuple[str, ...]
    locks: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        return f"sluice.test/{self.name}:dev"


ALL = (
    Image("sluice-sidecar", "sidecar", ("engine_image", "sidecar"), ("build", "sidecar")),
    Image("sluice-operator", "operator", ("engine_image", "sidecar", "operator", "crds"), ("build", "operator")),
    # Torch is mounted into the pods instead: five gigabytes in a layer would be copied on every run.
    Image("sluice-engine", "engine_image", ("engine_image",), ("build", "engine", "torch", "demo"), ("TORCH=without",)),
)


def ensure(progress: Progress) -> list[Path]:
    """The layouts of the product's images, built where a source, a lock or a Dockerfile is not what it was."""
    key = cache.digest([], words=[SUITE, INCLUDE])
    base = cache.ensure("base", key, lambda made: _bootstrap(progress, made))
    return [_ensure(progress, image, base / "base.tar", f"sluice.test/base:{key}") for image in ALL]


def pause(program: Path) -> Path:
    """The layout of the image that holds a pod's namespaces."""
    key = cache.digest([program], words=[PAUSE])
    return cache.ensure("images/pause", key, lambda made: layout.from_program(program, made, PAUSE))


def _bootstrap(progress: Progress, made: Path) -> None:
    with progress.task("base image", f"Debian {SUITE} with Python (about two minutes, once)"):
        tree = made / "tree"
        # In a mount namespace of its own, so that an interrupted run leaves nothing mounted.
        command.run(
            "debootstrap",
            ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={INCLUDE}", SUITE, tree],
        )
        for path in NOT_NEEDED:
            shutil.rmtree(tree / path, ignore_errors=True)
            (tree / path).mkdir()
        command.run("base-tar", ["tar", "-C", tree, "--numeric-owner", "-cf", made / "base.tar", "."])
        shutil.rmtree(tree)


def _ensure(progress: Progress, image: Image, base: Path, base_reference: str) -> Path:
    inputs = [
        *(ROOT / source for source in image.sources),
        *(ROOT / "requirements" / f"{lock}.txt" for lock in image.locks),
        ROOT / "LICENSE",
    ]

    def make(made: Path) -> None:
        with progress.task(image.name, "building the image"):
            _build(image, wheels.house(progress), base, base_reference, made)

    return cache.ensure(f"images/{image.name}", cache.digest(inputs, words=[base_reference, *image.arguments]), make)


def _build(image: Image, house: Path, base: Path, base_reference: str, made: Path) -> None:
    arguments = [
        f"BASE={base_reference}",
        f"BUILD_BASE={base_reference}",
        "PIP_NO_INDEX=1",
        f"PIP_FIND_LINKS={WHEELS_AT}",
        *image.arguments,
    ]
    words: list[object] = ["--layers", "--isolation", "chroot", "--volume", f"{house}:{WHEELS_AT}:ro"]
    for argument in arguments:
        words += ["--build-arg", argument]
    dockerfile = ROOT / image.folder / "Dockerfile"
    with cache.lock(cache.folder() / "storage"), tempfile.TemporaryDirectory(prefix="sluice-buildah-") as run:
        buildah = _Buildah(Path(run))
        buildah.import_base(base, base_reference)
        buildah("bud", [*words, "-f", dockerfile, "-t", image.reference, ROOT], log=f"image-{image.name}")
        buildah("push", ["--quiet", image.reference, f"dir:{made}/pushed"], log=f"push-{image.name}")
        layout.from_pushed(made / "pushed", made, image.reference)


class _Buildah:
    """Buildah on the storage in the cache, each call in a mount namespace of its own: nothing stays mounted."""

    def __init__(self, run: Path) -> None:
        storage = cache.folder() / "storage"
        self._start: list[object] = ["unshare", "--mount", "buildah", "--storage-driver", "overlay"]
        self._start += ["--root", storage, "--runroot", run]

    def __call__(self, verb: str, words: Sequence[object], *, log: str) -> None:
        command.run(log, [*self._start, verb, *words])

    def import_base(self, archive: Path, reference: str) -> None:
        """Puts the base into the storage, unless an earlier run has."""
        done = cache.folder() / "storage" / f"sluice-{reference.rpartition(':')[2]}"
        if done.exists():
            return
        dockerfile = archive.parent / "Dockerfile"
        dockerfile.write_text(f"FROM scratch\nADD {archive.name} /\n")
        words = ["--isolation", "chroot", "-f", dockerfile, "-t", reference, archive.parent]
        self("bud", words, log="image-base")
        done.touch()
