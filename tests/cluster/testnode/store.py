"""Containerd's store with the node's images already unpacked: made once, and linked into each run in a moment.

Unpacking half a gigabyte costs ten seconds of a run; containerd never writes to a blob or a committed snapshot again,
so that runs can share them as hard links. Only its databases are a run's own.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.testnode import cache, layout, programs
from cluster.testnode.errors import Broken
from cluster.testnode.progress import Progress

ANSWERS_WITHIN_S = 30
NAMESPACE = "k8s.io"  # where the kubelet looks


def ensure(progress: Progress, containerd: Path, images: Sequence[Path]) -> Path:
    """The store with those images, unpacked again only when one of them is not what it was."""

    def make(made: Path) -> None:
        earlier = [entry for entry in made.parent.iterdir() if entry.suffix != ".part"]
        if earlier:  # most layers are in it already: only what changed is unpacked
            made.rmdir()
            link(max(earlier, key=lambda entry: entry.stat().st_mtime), made)
        with progress.task("image store", "unpacking the images"), tempfile.TemporaryDirectory(prefix="sluice-") as run:
            _unpack(Path(run), containerd, images, made)

    key = cache.digest([image / "index.json" for image in images], words=[containerd.name])
    return cache.ensure("store", key, make)


def link(store: Path, root: Path) -> None:
    """A containerd root that shares the store's files; copied where the two lie on different disks."""
    if subprocess.run(["cp", "-al", store, root], capture_output=True, check=False).returncode:
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "-a", store, root], check=True)
    for shared in root.glob("*/*.db"):
        own = shared.with_suffix(".own")
        shutil.copy2(shared, own)
        own.rename(shared)


def _unpack(run: Path, containerd: Path, images: Sequence[Path], root: Path) -> None:
    address, log = run / "containerd.sock", cache.folder() / "logs" / "image-store.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    (run / "containerd.toml").write_text(f"""version = 3
root = "{root}"
state = "{run}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"]
[grpc]
address = "{address}"
""")
    environment = {**os.environ, "PATH": programs.path([containerd]), "CONTAINERD_ADDRESS": str(address)}
    words = ["unshare", "--mount", "containerd", "-c", f"{run}/containerd.toml"]
    with log.open("wb") as out:
        server = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            _await(server, environment, log)
            client = ["ctr", "-n", NAMESPACE, "images", "import", "-"]
            importing = subprocess.Popen(client, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=out)
            assert importing.stdin
            with contextlib.suppress(BrokenPipeError), importing.stdin as stdin:
                layout.stream(images, stdin)
            if importing.wait():
                raise Broken(f"image store: the images do not import (see {log})")
        finally:
            server.terminate()
            server.wait()


def _await(server: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + ANSWERS_WITHIN_S
    while subprocess.run(["ctr", "version"], env=environment, capture_output=True, check=False).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise Broken(f"image store: containerd does not answer (see {log})")
        time.sleep(0.1)
