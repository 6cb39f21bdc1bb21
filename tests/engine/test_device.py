from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sluice_engine.compute.device import choose_dtype, free_memory_bytes, usable_cores
from sluice_engine.errors import InvalidConfig

CPU = torch.device("cpu")
GIB = 1 << 30


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("flags", "wanted", "chosen"),
    [
        pytest.param("avx512f avx512_vnni", "Auto", torch.float32, id="auto without bfloat16 units"),
        pytest.param("avx512f avx512_bf16", "Auto", torch.bfloat16, id="auto with avx512_bf16"),
        pytest.param("amx_bf16 amx_tile", "Auto", torch.bfloat16, id="auto with amx"),
        pytest.param("avx512_bf16", "Float32", torch.float32, id="float32 is honoured"),
        pytest.param("avx2", "BFloat16", torch.bfloat16, id="bfloat16 is honoured"),
        pytest.param("avx512_fp16", "Float16", torch.float16, id="float16 where it is computed in"),
    ],
)
def test_the_data_type_follows_the_wish_or_the_hardware(
    tmp_path: Path, flags: str, wanted: str, chosen: torch.dtype
) -> None:
    root = _machine(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: fpu {flags}\n"})
    assert choose_dtype(wanted, CPU, root) is chosen  # type: ignore[arg-type]  # a table of literals


def test_float16_is_refused_where_the_cpu_does_not_compute_in_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"model\.data_type: is Float16"):
        choose_dtype("Float16", CPU, _machine(tmp_path, {"proc/cpuinfo": "flags : avx512f\n"}))


MEMINFO = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n"}
V2 = {"proc/self/cgroup": "0::/\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/kube/pod1\n4:memory:/kube/pod1\n"}


@pytest.mark.parametrize(
    ("files", "free_gib"),
    [
        pytest.param({}, 8, id="no container: what the machine has"),
        pytest.param({**V2, "sys/fs/cgroup/memory.max": "max"}, 8, id="a container without a limit"),
        pytest.param(
            {**V2, "sys/fs/cgroup/memory.max": str(4 * GIB), "sys/fs/cgroup/memory.current": str(GIB)},
            3,
            id="a limit less what is used",
        ),
        pytest.param(
            {
                **V2,
                "sys/fs/cgroup/memory.max": str(4 * GIB),
                "sys/fs/cgroup/memory.current": str(3 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            3,
            id="cache of files counts as free",
        ),
        pytest.param(
            {**V2, "sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}, 0, id="over it"
        ),
        pytest.param(
            {
                **V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            },
            1,
            id="the first version of cgroups, seen from inside",
        ),
        pytest.param(
            {**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 8, id="its way of no limit"
        ),
    ],
)
def test_free_memory_is_what_machine_and_container_both_leave(
    tmp_path: Path, files: dict[str, str], free_gib: int
) -> None:
    assert free_memory_bytes(CPU, _machine(tmp_path, MEMINFO | files)) == free_gib * GIB


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 8, id="no quota"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "max 100000"}, 8, id="a container without a quota"),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "150000 100000"}, 2, id="a core and a half is two threads"),
        pytest.param(
            {
                **V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3,
            id="the first version of cgroups",
        ),
        pytest.param({**V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, 8, id="its way of no quota"),
    ],
)
def test_threads_follow_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert usable_cores(_machine(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("wanted", "cores"),
    [
        pytest.param("1", 1, id="fewer-than-there-are"),
        pytest.param("999", len(os.sched_getaffinity(0)), id="more-than-there-are"),
        pytest.param("4,2", len(os.sched_getaffinity(0)), id="nested-levels-say-nothing-here"),
    ],
)
def test_the_number_of_threads_that_is_set_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str, cores: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert usable_cores(tmp_path) == cores
