"""What this machine computes with, and how much memory it has left: asked of the hardware, never assumed.

Owns the choice of data type, the number of threads and the measure of free memory. `/proc` and `/sys` come in as a root
so that tests can lay out any container.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from sluice_engine.config import DataType
from sluice_engine.errors import InvalidConfig

_DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
_FLOAT16_FLAGS = {"avx512_fp16", "amx_fp16"}

# cgroup v1 says "no limit" by a number near 2^63.
_NO_LIMIT = 1 << 60


def choose_device(accelerator_count: int, rank: int = 0) -> torch.device:
    """The rank's GPU where any are asked for, else the CPU.

    Raises:
        InvalidConfig: GPUs are asked for and torch sees none, or fewer.
    """
    if accelerator_count == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidConfig("accelerator_count", f"is {accelerator_count}, but torch sees no GPU on this machine")
    if torch.cuda.device_count() < accelerator_count:
        problem = f"is {accelerator_count}, and this machine has {torch.cuda.device_count()} that torch sees"
        raise InvalidConfig("accelerator_count", problem)
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def choose_dtype(wanted: DataType, device: torch.device, root: Path = Path("/")) -> torch.dtype:
    """The type that weights, KV cache and products have.

    Raises:
        InvalidConfig: the hardware does not compute in the type that is set.
    """
    if device.type == "cuda":
        can_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if wanted == "BFloat16" and not can_bfloat16:
            raise InvalidConfig("model.data_type", "is BFloat16, which this GPU does not compute in; Float16 is")
        return _DTYPES.get(wanted, torch.bfloat16 if can_bfloat16 else torch.float16)
    flags = cpu_flags(root)
    if wanted == "Auto":
        return torch.bfloat16 if flags & _BFLOAT16_FLAGS else torch.float32
    if wanted == "Float16" and not flags & _FLOAT16_FLAGS:
        raise InvalidConfig(
            "model.data_type", "is Float16, which this CPU does not compute in; Float32 is always right"
        )
    return _DTYPES[wanted]


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: its affinity, the container's quota rounded up, and `OMP_NUM_THREADS`."""
    cores = len(os.sched_getaffinity(0))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isascii() and wanted.isdecimal():
        cores = min(cores, int(wanted))
    for directory in _cgroups(root, "cpu"):
        quota, period = _cpu_quota(directory)
        if quota > 0:
            cores = min(cores, -(-quota // period))
    return max(1, cores)


def free_memory_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Memory that can still be taken: the GPU's, or the machine's within the container's limit."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, _total = torch.cuda.mem_get_info(device)
        return free
    free = _meminfo(root).get("MemAvailable", 0)
    for directory in _cgroups(root, "memory"):
        limit = _number(directory / "memory.max", directory / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            used = _number(directory / "memory.current", directory / "memory.usage_in_bytes") or 0
            # Cache of files that were read is given back under pressure.
            used -= min(used, _stat(directory / "memory.stat", "inactive_file", "total_inactive_file"))
            free = min(free, limit - used)
    return max(0, free)


def dtype_name(dtype: torch.dtype) -> str:
    """A type as configurations and people write it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """Machine, type and threads, in words that agree exactly where speeds may be compared."""
    kind = dtype_name(dtype)
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {kind}, torch {torch.__version__}"
    model = _cpu_field(Path("/"), "model name") or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads, {kind}, torch {torch.__version__}"


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Directories of this process's cgroup and its parents, as far as they are visible from here."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = Path(path.lstrip("/")).parts
        # A container sees its own cgroup at the mount, under whatever name the host has for it.
        found += [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [directory for directory in found if directory.is_dir()]


def _cpu_quota(directory: Path) -> tuple[int, int]:
    """(quota, period) in µs; quota −1 without a limit."""
    words = _text(directory / "cpu.max").split()
    if len(words) == 2:
        return (-1 if words[0] == "max" else int(words[0])), int(words[1])
    quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
    return (quota or -1), (period or 100_000)


def _number(*paths: Path) -> int | None:
    """The first of these files that holds a number."""
    for path in paths:
        try:
            return int(_text(path))
        except ValueError:
            continue
    return None


def _stat(path: Path, *names: str) -> int:
    values = dict(line.split(None, 1) for line in _text(path).splitlines() if " " in line)
    return max((int(values[name]) for name in names if name in values), default=0)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """What the processor can do, in the kernel's words."""
    return frozenset(_cpu_field(root, "flags").split())


def _cpu_field(root: Path, name: str) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
