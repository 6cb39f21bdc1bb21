"""Own kernels say what torch says; a machine that cannot have them computes without."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from engine.reference import Reference, greedy, load_runner, outputs, run
from sluice_engine.compute.attention import plain
from sluice_engine.compute.device import cpu_flags
from sluice_engine.config import ModelSource
from sluice_engine.errors import InvalidConfig
from sluice_engine.kernels.block_types import Q4_0, Q4_1, Q8_0
from sluice_engine.kernels.build import LEVELS, SOURCE, Found, find_or_build
from sluice_engine.kernels.build import main as build_into
from sluice_engine.kernels.library import SWITCH, Blocks, Kernels, Tiles, load_kernels, rows_per_tile
from sluice_engine.model_files.sources import resolve
from sluice_engine.model_files.weights import load, open_tensors
from tiny_model import make_tiny_llama

needs_kernels = pytest.mark.skipif(
    isinstance(load_kernels(cpu_flags(), torch.float32), str),
    reason="no kernels here: another processor, or no compiler",
)


DTYPES = [torch.float32, torch.bfloat16]
AVX512, AVX2 = LEVELS
NEEDED_FLAGS = AVX512.needed_flags


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="module", params=[level.name for level in LEVELS])
def kernels(request: pytest.FixtureRequest, dtype: torch.dtype) -> Kernels:
    level: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, level)
        loaded = load_kernels(cpu_flags(), dtype)
    if isinstance(loaded, str) and loaded.startswith("the processor lacks"):
        pytest.skip(loaded)
    assert isinstance(loaded, Kernels), loaded
    assert loaded.level == level
    return loaded


def assert_close(found: Tensor, exact: Tensor, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    """As near to what float32 gives as the result's type lets it be: bfloat16 keeps eight bits."""
    if found.dtype is torch.bfloat16:
        rtol, atol = 1 / 256 + rtol, max(atol, 1e-3)
    torch.testing.assert_close(found.float(), exact.float(), rtol=rtol, atol=atol)


@needs_kernels
@settings(max_examples=60)
@given(
    shares=st.one_of(
        st.lists(st.tuples(st.integers(0, 600), st.integers(1, 20)), min_size=1, max_size=20),
        st.lists(st.tuples(st.integers(0, 600), st.just(1)), min_size=1, max_size=20),
    ),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    head_dim=st.sampled_from([32, 48, 64, 128]),
    block_tokens=st.sampled_from([1, 8, 16, 24]),
    window=st.sampled_from([None, 1, 9, 64, 300]),
    seed=st.integers(0, 99),
)
def test_attention_in_place_equals_plain_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    shares: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    window: int | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ends = [start + num_rows for start, num_rows in shares]
    widths = [-(-end // block_tokens) for end in ends]
    free = torch.randperm(sum(widths) + 1, generator=generator)
    tables = torch.zeros(len(shares), max(widths), dtype=torch.int64)
    # What nobody wrote must not matter.
    layer = torch.full((len(free) * block_tokens, 2 * kv_heads * head_dim), 1e4, dtype=dtype)
    q = random(sum(rows for _, rows in shares), (kv_heads * group + 1) * head_dim)
    queries = q[:, : kv_heads * group * head_dim].view(len(q), -1, head_dim)  # rows with a stride, as in qkv
    per_tile = rows_per_tile(group)
    tiles, expected, first = [], [], 0
    for index, (start, num_rows) in enumerate(shares):
        tables[index, : widths[index]], free = free[: widths[index]], free[widths[index] :]
        keys_values = random(ends[index], 2 * kv_heads * head_dim)
        at = torch.arange(ends[index])
        layer[tables[index][at // block_tokens] * block_tokens + at % block_tokens] = keys_values
        keys, values = keys_values.view(-1, 2, kv_heads, head_dim).unbind(1)
        expected.append(plain(queries[first : first + num_rows].float(), keys, values, start, window))
        tiles += [(first + i, min(per_tile, num_rows - i), start + i + 1, index) for i in range(0, num_rows, per_tile)]
        first += num_rows
    out = torch.full(queries.shape, float("nan"), dtype=dtype)
    kernels.attend(queries, Tiles(tables, torch.tensor(tiles), max(ends)), layer, block_tokens, kv_heads, out, window)
    assert_close(out, torch.cat(expected), rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("window", [None, 2000, 300])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_long_context_alone_is_split_and_put_together_again(
    kernels: Kernels, dtype: torch.dtype, kv_heads: int, window: int | None
) -> None:
    q, layer = (torch.randn(1, 3 * kv_heads, 64) * 4).to(dtype), torch.randn(3200, 2 * kv_heads * 64).to(dtype)
    table = torch.randperm(200)[None]
    out = torch.empty_like(q)
    kernels.attend(q, Tiles(table, torch.tensor([[0, 1, 3190, 0]]), 3190), layer, 16, kv_heads, out, window)
    keys, values = layer.view(200, 16, 2, kv_heads, 64)[table[0]].view(3200, 2, kv_heads, 64)[:3190].unbind(1)
    assert_close(out, plain(q.float(), keys, values, 3189, window), rtol=1e-4)


@needs_kernels
@settings(max_examples=40)
@given(
    rows=st.integers(1, 60), width=st.integers(1, 40).map(lambda n: n * 16), scale=st.sampled_from([1e-3, 1.0, 90.0])
)
def test_what_lies_between_the_products_equals_torch(
    kernels: Kernels, dtype: torch.dtype, rows: int, width: int, scale: float
) -> None:
    x, weight = (torch.randn(rows, width) * scale).to(dtype), torch.randn(width).to(dtype)
    assert_close(kernels.norm(x, weight, 1e-5), torch.rms_norm(x.float(), (width,), weight.float(), 1e-5))
    assert_close(kernels.norm(x, None, 1e-5), torch.rms_norm(x.float(), (width,), None, 1e-5))
    gate_up = (torch.randn(rows, 2 * width) * scale).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    assert_close(kernels.silu_mul(gate_up), silu(gate) * up)


@needs_kernels
def test_what_is_no_number_stays_none(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.randn(2, 32).to(dtype)
    x[1, 3] = float("nan")
    assert kernels.norm(x, None, 1e-5).isnan().any(-1).tolist() == [False, True]


@needs_kernels
@settings(max_examples=40)
@given(
    rows=st.integers(1, 40),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 64, 96]),
    normed=st.booleans(),
)
def test_turning_and_storing_equals_torch(
    kernels: Kernels, dtype: torch.dtype, rows: int, heads: int, kv_heads: int, head_dim: int, *, normed: bool
) -> None:
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.rand(100, 1, head_dim // 2) * 6
    turns = torch.polar(torch.ones_like(angles), angles)
    positions, kv_rows = torch.randint(0, 100, (rows,)), torch.randperm(200)[:rows]
    num_turned = heads + kv_heads
    before = qkv.float().view(rows, -1, head_dim).clone()
    weights = torch.randn(2, head_dim).to(dtype)
    if normed:
        each = weights.float().repeat_interleave(torch.tensor([heads, kv_heads]), dim=0)
        before[:, :num_turned] = torch.rms_norm(before[:, :num_turned], (head_dim,), None, 0.1) * each
        before = before.to(dtype).float()
    turned = torch.view_as_complex(before.view(rows, -1, head_dim // 2, 2).clone())
    turned[:, :num_turned] *= turns[positions]
    expected = torch.view_as_real(turned).reshape(rows, -1)
    layer = torch.zeros(200, 2 * kv_heads * head_dim, dtype=dtype)
    kernels.turn_and_store(qkv, turns, positions, layer, kv_rows, heads, kv_heads, (weights, 0.1) if normed else None)
    # Numbers in bfloat16 are rounded twice: normed, then turned.
    assert_close(qkv, expected, atol=0.03 if normed and dtype is torch.bfloat16 else 1e-5)
    assert torch.equal(layer[kv_rows], qkv[:, heads * head_dim :])
    assert int(layer.any(-1).sum()) == rows


@needs_kernels
@settings(max_examples=40)
@given(
    rows=st.integers(1, 30),
    in_blocks=st.integers(1, 12),
    out_fours=st.integers(1, 30),
    kind=st.sampled_from([Q4_0, Q4_1, Q8_0]),
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_with_blocks_equals_one_with_what_they_stand_for(
    kernels: Kernels,
    dtype: torch.dtype,
    *,
    rows: int,
    in_blocks: int,
    out_fours: int,
    kind: int,
    adds: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_blocks * 32, generator=generator).to(dtype)
    weight = torch.randn(out_fours * 4, in_blocks * 32, generator=generator)
    residual = torch.randn(rows, out_fours * 4, generator=generator).to(dtype) if adds else None
    quantisation = gguf.GGMLQuantizationType(kind)
    raw = gguf.quants.quantize(weight.numpy(), quantisation)
    exact = torch.from_numpy(gguf.quants.dequantize(raw, quantisation)).double()
    expected = x.double() @ exact.T + (0 if residual is None else residual.double())
    product = kernels.multiply(x, Blocks.from_file(raw, kind), residual)
    assert_close(product, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@needs_kernels
def test_rows_kept_as_blocks_are_those_that_were_dequantised() -> None:
    """Norms, rotary pairs and merged rows: one token through blocks and 13 through packed weights agree."""
    tensors = open_tensors(resolve(ModelSource(demo="smollm2-135m")))
    weights = load(tensors, torch.float32, torch.device("cpu"), lambda _: None, keep_blocks=True)
    loaded = load_kernels(cpu_flags(), torch.float32)
    assert isinstance(loaded, Kernels)
    layers = list(weights.layers)
    for layer in (layers[0], layers[-1]):
        pairs = (
            (layer.qkv, layer.blocks.qkv, layer.qkv_norm),
            (layer.attention_out, layer.blocks.attention_out, None),
            (layer.gate_up, layer.blocks.gate_up, layer.gate_up_norm),
            (layer.down, layer.blocks.down, None),
        )
        for matrix, blocks, norm in pairs:
            assert blocks is not None
            assert blocks.kind == Q4_1
            x = torch.randn(3, matrix.shape[1])
            product = loaded.multiply(x if norm is None else x * norm, blocks)
            torch.testing.assert_close(product, x @ matrix.T, rtol=1e-4, atol=1e-4)
    assert weights.head_blocks is not None
    x = torch.randn(2, weights.head.shape[1])
    torch.testing.assert_close(loaded.multiply(x, weights.head_blocks), x @ weights.head.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("switch", "path_taken"),
    [
        pytest.param("", "own kernels, avx", marks=needs_kernels, id="on"),
        pytest.param("avx2", "own kernels, avx2", marks=needs_kernels, id="avx2"),
        pytest.param("off", "torch alone", id="off"),
    ],
)
def test_a_model_says_what_transformers_says_with_kernels_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, path_taken: str
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    path = make_tiny_llama(tmp_path / "model", seed=5, num_heads=4, num_kv_heads=2)
    runner = load_runner(ModelSource(path=str(path)), capacity_bytes=1 << 20)
    assert path_taken in runner.description
    prompts = [[(seed * 31 + i * i) % 256 for i in range(length)] for seed, length in enumerate((1, 2, 17, 90, 40))]
    requests = [greedy(str(i), prompt) for i, prompt in enumerate(prompts)]
    scheduler = run(runner, requests, per_request=7, num_blocks=12)
    assert scheduler.preemptions_total > 0
    reference = Reference.from_directory(path)
    for prompt, output in zip(prompts, outputs(requests), strict=True):
        reference.assert_greedy(prompt, output)
    assert reference.ties == 0


@pytest.mark.parametrize(
    ("switch", "path_taken"),
    [
        pytest.param("", "own kernels, avx", marks=needs_kernels, id="on"),
        pytest.param("avx2", "own kernels, avx2", marks=needs_kernels, id="avx2"),
        pytest.param("off", "torch alone", id="off"),
    ],
)
def test_in_bfloat16_a_model_says_nearly_what_it_says_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, path_taken: str
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    path = make_tiny_llama(tmp_path / "model", seed=5, num_heads=4, num_kv_heads=2)
    runner = load_runner(ModelSource(path=str(path)), capacity_bytes=1 << 20, data_type="BFloat16")
    assert path_taken in runner.description
    requests = [greedy(str(i), [(i * 31 + j * j) % 256 for j in range(n)]) for i, n in enumerate((1, 2, 17, 90, 40))]
    scheduler = run(runner, requests, per_request=7, num_blocks=12)
    assert scheduler.preemptions_total > 0
    reference = Reference.from_directory(path)
    for request, output in zip(requests, outputs(requests), strict=True):
        # Logits of this model lie around 1: eight bits of each number leave a hundredth or two.
        reference.assert_greedy(request.tokens[: request.num_prompt], output, tie=0.05)


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _reason(NEEDED_FLAGS) == "no C compiler (cc) is installed"
    assert build_into(str(tmp_path)) == 0
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_a_reason_of_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _compiler(tmp_path / "cc", 'test "$1" = --version && exit 0; echo "cc: what is this" >&2; echo more >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _reason(NEEDED_FLAGS) == f"{tmp_path / 'cc'} failed: cc: what is this"


def test_a_cache_that_cannot_be_written_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _compiler(tmp_path / "cc", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "could not be built" in _reason(NEEDED_FLAGS)


def test_the_widest_registers_that_a_processor_has_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _compiler(tmp_path / "cc", 'while [ "$1" != -o ]; do [ $# = 1 ] && exit 0; shift; done; printf whole > "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def level(flags: frozenset[str], only: str | None = None) -> str:
        found = find_or_build(flags, "float32", only)
        return found.level.name if isinstance(found, Found) else found

    assert level(AVX512.needed_flags) == "avx512"
    assert level(AVX512.needed_flags, only="avx2") == "avx2"
    assert level(AVX512.needed_flags - {"avx512bw"}) == "avx2"
    assert level(AVX2.needed_flags) == "avx2"
    assert level(AVX2.needed_flags - {"fma"}) == "the processor lacks fma"
    assert level(AVX2.needed_flags, only="avx512").startswith("the processor lacks avx512bw, ")


@pytest.mark.parametrize("said", ["0", "OFF", "false", "avx"])
def test_a_switch_that_says_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv(SWITCH, said)
    with pytest.raises(
        InvalidConfig, match=f"SLUICE_KERNELS: is '{said}' in the environment; on, off, avx512 and avx2"
    ):
        load_kernels(NEEDED_FLAGS, torch.float32)


def test_another_type_of_elements_is_a_reason() -> None:
    assert load_kernels(NEEDED_FLAGS, torch.float16) == "they compute in float32 and bfloat16, not in float16"


def test_starts_at_the_same_time_find_a_whole_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _compiler(tmp_path / "cc", 'while [ "$1" != -o ]; do [ $# = 1 ] && exit 0; shift; done; printf whole > "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(_content(NEEDED_FLAGS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["whole"] * 4


def _content(flags: frozenset[str]) -> str:
    found = find_or_build(flags, "float32")
    return found if isinstance(found, str) else found.path.read_text()


def _reason(flags: frozenset[str]) -> str:
    assert not SOURCE.with_name(AVX512.library("float32")).exists(), "a prebuilt library lies in the source tree"
    found = find_or_build(flags, "float32")
    assert isinstance(found, str)
    return found


def _compiler(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
