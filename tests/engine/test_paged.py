"""Attention that reads the paged cache in place: the kernel against the reference, and the choice of who computes it.

The kernel runs in Triton's interpreter, which computes on the CPU what the compiled kernel computes on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice_engine.compute.paged import (
    Facts,
    GatheredAttention,
    PagedAttention,
    choose,
    error_of,
    prove,
    reasons_against,
)
from sluice_engine.compute.paged_rows import PagedRows
from sluice_engine.model_files.architecture import Architecture

CPU = torch.device("cpu")
SHAPE = Architecture(
    vocab_size=10,
    hidden_size=128,
    intermediate_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_length_tokens=2048,
    norm_epsilon=1e-5,
    rope_theta=10_000.0,
)
HOPPER = Facts(
    dtype=torch.bfloat16,
    head_dim=128,
    block_tokens=16,
    has_window=False,
    capability_major=9,
    cudnn=92_600,
    varlen_pages=True,
    has_triton=True,
)


def kernel(block_tokens: int, kv_heads: int, num_processors: int) -> PagedAttention:
    pytest.importorskip("triton", reason="this platform has no triton")
    from sluice_engine.compute.paged_triton import TritonAttention  # noqa: PLC0415  # triton is not everywhere

    return TritonAttention(block_tokens, kv_heads, num_processors)


@pytest.mark.parametrize(
    ("shares", "heads", "head_dim", "block_tokens", "window"),
    [
        pytest.param([(0, 1), (0, 1)], (4, 2), 64, 16, None, id="first tokens, nothing before them"),
        pytest.param([(0, 1), (7, 1), (8, 1), (90, 1)], (9, 3), 64, 8, None, id="single rows of every length"),
        pytest.param([(0, 24)], (4, 4), 96, 16, None, id="a chunk at the start, heads of 96"),
        pytest.param([(33, 1), (0, 5), (37, 40)], (4, 2), 128, 16, None, id="a mixed batch, heads of 128"),
        pytest.param([(5, 70), (0, 1), (64, 65)], (5, 1), 64, 24, None, id="odd blocks, one KV head for five"),
        pytest.param([(90, 1), (3, 1)], (4, 2), 64, 16, 7, id="single rows within a window"),
        pytest.param([(90, 30), (0, 20)], (4, 2), 64, 16, 50, id="chunks within a window"),
        pytest.param([(20, 3)], (4, 2), 64, 16, 1, id="a window of one token"),
    ],
)
def test_the_kernel_computes_what_the_reference_computes(
    shares: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, block_tokens: int, window: int | None
) -> None:
    shape = replace(SHAPE, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    backend = kernel(block_tokens, heads[1], 1)
    assert error_of(backend, shares, shape, block_tokens, torch.float32, CPU, window) < 1e-4


@pytest.mark.parametrize(
    ("shares", "window"),
    [
        pytest.param([(1500, 1)], None, id="one long context in many shares"),
        pytest.param([(1500, 1), (0, 1), (700, 1)], None, id="short ones have empty shares beside it"),
        pytest.param([(1500, 1), (3, 1)], 600, id="shares of a window"),
    ],
)
def test_split_contexts_come_together(shares: list[tuple[int, int]], window: int | None) -> None:
    backend = kernel(16, SHAPE.num_kv_heads, 64)
    assert error_of(backend, shares, SHAPE, 16, torch.float32, CPU, window) < 1e-4


def test_the_kernel_computes_in_half_precision() -> None:
    assert error_of(kernel(16, 2, 1), [(40, 1), (0, 9)], SHAPE, 16, torch.float16, CPU, None) < 4e-3


def test_the_kernel_passes_the_proof_of_a_start() -> None:
    assert prove(kernel(16, 2, 8), SHAPE, 16, torch.float32, CPU) == ""


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        pytest.param("varlen", {}, "", id="torch's own on a Hopper with a new cuDNN"),
        pytest.param("varlen", {"capability_major": 8}, "capability 9 or 10", id="not on an Ampere"),
        pytest.param("varlen", {"cudnn": 91_900}, "cuDNN 9.24", id="not with an old cuDNN"),
        pytest.param("varlen", {"has_window": True}, "sliding window", id="not with a sliding window"),
        pytest.param("varlen", {"dtype": torch.float32}, "bfloat16 and float16", id="not in float32"),
        pytest.param("varlen", {"head_dim": 256}, "heads of 256", id="not with wide heads"),
        pytest.param("varlen", {"block_tokens": 24}, "power of two", id="not with odd blocks"),
        pytest.param("varlen", {"varlen_pages": False}, "no block table", id="not with an old torch"),
        pytest.param("triton", {"capability_major": 8, "has_window": True}, "", id="the kernel anywhere"),
        pytest.param("triton", {"has_triton": False}, "not installed", id="not without triton"),
    ],
)
def test_who_is_tried_follows_from_facts(name: str, changes: dict[str, object], words: str) -> None:
    reasons = reasons_against(name, replace(HOPPER, **changes))  # type: ignore[arg-type]  # a table of keywords
    assert [words in reason for reason in reasons] == [True] * bool(words)


class Scripted:
    """A backend that adds `error` to what it does not compute."""

    def __init__(self, name: str, error: float | None) -> None:
        self.name = name
        self.error = error

    def attend(self, q: Tensor, rows: PagedRows, layer: Tensor, out: Tensor, window: int | None) -> None:
        if self.error is None:
            raise RuntimeError("no kernel image is available")
        GatheredAttention(16, 2).attend(q, rows, layer, out, window)
        out[-1, -1, -1] += self.error


@pytest.mark.parametrize(
    ("varlen_error", "triton_error", "chosen"),
    [
        pytest.param(0.0, 0.0, "varlen", id="the first that is right"),
        pytest.param(0.1, 0.0, "triton", id="not one that errs"),
        pytest.param(float("nan"), 0.0, "triton", id="not one that gives no number"),
        pytest.param(None, 0.0, "triton", id="not one that raises"),
        pytest.param(None, 1.0, None, id="none when none is right"),
    ],
)
def test_a_backend_is_proved_before_it_is_taken(
    varlen_error: float | None, triton_error: float, chosen: str | None
) -> None:
    errors = {"varlen": varlen_error, "triton": triton_error}
    found = choose(
        ("varlen", "triton"),
        HOPPER,
        lambda name: Scripted(name, errors[name]),
        lambda backend: (
            "" if error_of(backend, [(3, 1), (0, 2)], SHAPE, 16, torch.float32, CPU, None) < 1e-4 else "off"
        ),
    )
    assert (found.name if found is not None else None) == chosen


@pytest.mark.slow
def test_the_kernel_compiles_for_cards_that_are_not_here(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="this platform has no triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_kernel.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
