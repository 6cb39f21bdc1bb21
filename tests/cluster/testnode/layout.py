"""Images as OCI layouts: written blob by blob, streamed into containerd as one archive.

It knows the format's few documents and nothing of how an image is built or where it runs.
"""

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

Document = dict[str, Any]
"""A manifest or a configuration, as JSON has it."""


def from_pushed(pushed: Path, layout: Path, reference: str) -> None:
    """A layout from what `buildah push dir:` wrote, which unlike its `oci:` leaves the layers uncompressed."""
    blobs = _blobs(layout)
    for blob in pushed.iterdir():
        if blob.name not in {"manifest.json", "version"}:
            blob.rename(blobs / blob.name)
    _index(layout, reference, (pushed / "manifest.json").read_bytes())
    shutil.rmtree(pushed)


def from_program(program: Path, layout: Path, reference: str) -> None:
    """A layout of one layer with one static program, which is what the image runs."""
    data = program.read_bytes()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(program.name)
        entry.size, entry.mode = len(data), 0o755
        tar.addfile(entry, io.BytesIO(data))
    layer = _describe(layout, LAYER, archive.getvalue())
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _describe(layout, CONFIG, json.dumps(config).encode()),
        "layers": [layer],
    }
    _index(layout, reference, json.dumps(manifest).encode())


def on_top(manifest: Document, config: Document, layer: bytes, layout: Path, reference: str) -> None:
    """A layout of an image with one layer more, an uncompressed archive; the others are not in it."""
    described = _describe(layout, LAYER, layer)
    changed = {**config, "rootfs": {"type": "layers", "diff_ids": [*config["rootfs"]["diff_ids"], described["digest"]]}}
    changed.pop("history", None)  # of as many layers as there were
    made = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _describe(layout, CONFIG, json.dumps(changed).encode()),
        "layers": [*manifest["layers"], described],
    }
    _index(layout, reference, json.dumps(made).encode())


def stream(layouts: Iterable[Path], out: IO[bytes]) -> None:
    """Writes the layouts as one OCI archive in which a shared layer stands once."""
    manifests: list[object] = []
    blobs: dict[str, Path] = {}
    for layout in layouts:
        manifests += json.loads((layout / "index.json").read_text())["manifests"]
        blobs |= {blob.name: blob for blob in (layout / "blobs" / "sha256").iterdir()}
    with tarfile.open(fileobj=out, mode="w|") as tar:
        for name, document in (
            ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
            ("index.json", {"schemaVersion": 2, "manifests": manifests}),
        ):
            data = json.dumps(document).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for name, blob in sorted(blobs.items()):
            tar.add(blob, f"blobs/sha256/{name}")


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _blobs(layout: Path) -> Path:
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    return blobs


def _describe(layout: Path, media_type: str, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    (_blobs(layout) / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _index(layout: Path, reference: str, manifest: bytes) -> None:
    described = _describe(layout, MANIFEST, manifest)
    described["annotations"] = {"org.opencontainers.image.ref.name": reference}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
