"""Products of ever other sizes leave little behind in the engine's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sluice_engine import native_settings

# As an engine's steps do: every number of rows, in no order. What is left once free memory went back to the system.
PROGRAM = """
import ctypes, random, sys
from pathlib import Path
import torch
from sluice_engine.compute.linear import Linear

def own_bytes():
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

torch.set_num_threads(1)
rows, multiply = torch.zeros(700, 64), Linear(torch.zeros(64, 64), keep_rows=False)
multiply(rows)
before = own_bytes()
for count in random.Random(1).sample(range(2, 700), 600):
    multiply(rows[:count])
print(own_bytes() - before)
"""


def left_behind(environment: dict[str, str]) -> int:
    """Bytes that 600 sizes of one product leave in a process of their own."""
    clean = {name: value for name, value in os.environ.items() if name not in native_settings.NAMES}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_what_nobody_set_is_set_and_what_somebody_set_stays() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    native_settings.apply(environment)

    assert environment == {
        "LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "GOMP_SPINCOUNT": "10000",
    }  # fmt: skip


def test_whoever_says_how_threads_wait_is_obeyed() -> None:
    environment = {"OMP_WAIT_POLICY": "active"}
    native_settings.apply(environment)

    assert "GOMP_SPINCOUNT" not in environment


@pytest.mark.slow
def test_what_products_were_prepared_for_is_forgotten() -> None:
    environment: dict[str, str] = {}
    native_settings.apply(environment)

    assert left_behind(environment) < left_behind({}) / 2
