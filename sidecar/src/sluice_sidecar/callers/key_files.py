"""The folder in which API keys are mounted from a Secret: one file a tenant, swapped whole by the kubelet."""

from __future__ import annotations

from pathlib import Path

from sluice_engine.errors import InvalidConfig
from sluice_engine.watched import MOST_BYTES, Watched, read_small
from sluice_sidecar.callers.api_keys import ApiKeys

KeyFiles = Watched[dict[str, bytes], ApiKeys]


def key_files(folder: str, secret: bytes) -> KeyFiles:
    """The keys in a folder; `load` them first. `secret` is this process's own."""
    return Watched("api keys", lambda: _read(Path(folder)), lambda files: ApiKeys.parse(files, secret))


def _read(folder: Path) -> dict[str, bytes]:
    """File name → content. An empty folder is no key at all, and no fault: the Secret may come later."""
    try:
        # All files of one revision: `..data` is a link that is swapped, and its folder stays as it is.
        data = folder / "..data"
        files = {
            path.name: read_small(path)
            for path in sorted((data.resolve(strict=True) if data.is_symlink() else folder).iterdir())
            if not path.name.startswith("..")
        }
    except OSError as error:
        raise InvalidConfig(str(folder), f"cannot be read: {error.strerror}") from error
    except RuntimeError as error:  # pathlib's word for it, up to Python 3.12
        raise InvalidConfig(str(folder), "cannot be read: ..data is a link that leads to itself") from error
    if sum(map(len, files.values())) > MOST_BYTES:
        raise InvalidConfig(str(folder), f"holds more than {MOST_BYTES} bytes")
    return files
