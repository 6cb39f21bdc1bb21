"""In bfloat16 few rows are multiplied in integers: what that computes, and for whom it is the same bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.reference import Reference, greedy, outputs, run
from sluice_engine.compute import loading
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.device import cpu_flags
from sluice_engine.compute.inputs import StepBuilder
from sluice_engine.compute.linear import Linear
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.compute.synthetic import first_plan, piece_plan
from sluice_engine.config import CacheConfig, DataType, EngineConfig, ModelConfig, ModelSource, Quantization
from sluice_engine.kernels.block_types import Q4_0, Q4_1, Q8_0
from sluice_engine.kernels.library import SWITCH, Blocks, Interleaved, Kernels, load_kernels
from tiny_model import make_tiny_llama

KINDS = [Q4_0, Q4_1, Q8_0]
VNNI = "avx512_vnni"
needs_kernels = pytest.mark.skipif(
    isinstance(load_kernels(cpu_flags(), torch.bfloat16), str),
    reason="no kernels here: another processor, or no compiler",
)
# Whole groups and blocks in every product; the head's 272 rows as well.
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "tied_head": False, "num_layers": 3, "vocab_size": 272}


@pytest.fixture(
    scope="module",
    params=[("avx512", True), ("avx512", False), ("avx2", False)],
    ids=["avx512, vnni", "avx512, no vnni", "avx2"],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    level, with_vnni = request.param
    flags = cpu_flags()
    if with_vnni and VNNI not in flags:
        pytest.skip(f"the processor lacks {VNNI}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, level)
        loaded = load_kernels(flags if with_vnni else flags - {VNNI}, torch.bfloat16)
    if isinstance(loaded, str) and loaded.startswith(("the processor lacks", "no C compiler")):
        pytest.skip(loaded)
    assert isinstance(loaded, Kernels), loaded
    assert loaded.has_vnni is with_vnni
    return loaded


def blocks_of(weight: Tensor, kind: int) -> tuple[Blocks, Tensor]:
    """A matrix as blocks, and what they stand for."""
    quantisation = gguf.GGMLQuantizationType(kind)
    raw = gguf.quants.quantize(weight.numpy(), quantisation)
    return Blocks.from_file(raw, kind), torch.from_numpy(gguf.quants.dequantize(raw, quantisation)).double()


def interleaved(weight: Tensor, kind: int) -> Interleaved:
    found = Interleaved.of(blocks_of(weight, kind)[0])
    assert found is not None
    return found


def quantised(x: Tensor) -> Tensor:
    """What 32 values in turn stand for as bytes and a scale of their own: GGUF's Q8_1."""
    by_block = x.float().view(len(x), -1, 32)
    most = by_block.abs().amax(-1, keepdim=True)
    steps = torch.where(most > 0, torch.full_like(most, 127) / most, 0)  # a number over a tensor would be rounded twice
    found: Tensor = (by_block * steps).round().double() * (most / 127).double()
    return found.view(x.shape)


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    in_blocks=st.integers(1, 12),
    out_groups=st.integers(1, 9),
    kind=st.sampled_from(KINDS),
    adds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_the_quantised_activations(
    kernels: Kernels, *, rows: int, in_blocks: int, out_groups: int, kind: int, adds: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_blocks * 32, generator=generator).to(torch.bfloat16)
    blocks, exact = blocks_of(torch.randn(out_groups * 16, in_blocks * 32, generator=generator), kind)
    residual = torch.randn(rows, out_groups * 16, generator=generator).to(torch.bfloat16) if adds else None
    arranged = kernels.arranged(blocks)
    assert isinstance(arranged, Interleaved)
    product = kernels.multiply(x, arranged, residual)
    expected = quantised(x) @ exact.T + (0 if residual is None else residual.double())
    # Rounded to eight bits at the end, and nowhere before.
    torch.testing.assert_close(product.double(), expected, rtol=2**-8, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_weights_and_activations_fit_into_sums(kernels: Kernels, kind: int) -> None:
    """Every byte at its end: where two products were added up in 16 bits, they would be cut off."""
    for sign in (1.0, -1.0):
        weight = torch.full((16, 64), sign)
        weight[:, ::32] = 0.0  # so that Q4_1 has a span
        blocks, exact = blocks_of(weight, kind)
        x = torch.full((3, 64), -sign, dtype=torch.bfloat16)
        product = kernels.multiply(x, kernels.arranged(blocks))
        torch.testing.assert_close(product.double(), quantised(x) @ exact.T, rtol=2**-8, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(kernels: Kernels, kind: int) -> None:
    generator = torch.Generator().manual_seed(kind)
    weights = interleaved(torch.randn(48, 192, generator=generator), kind)
    x = torch.randn(23, 192, generator=generator).to(torch.bfloat16)
    residual = torch.randn(23, 48, generator=generator).to(torch.bfloat16)
    alone = torch.cat([kernels.multiply(x[i : i + 1], weights, residual[i : i + 1]) for i in range(len(x))])
    for rows in range(1, len(x) + 1):
        assert torch.equal(kernels.multiply(x[:rows], weights, residual[:rows]), alone[:rows])


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none_in_its_row_alone(kernels: Kernels, value: float) -> None:
    x = torch.randn(9, 64).to(torch.bfloat16)
    x[4, 40] = value
    product = kernels.multiply(x, interleaved(torch.randn(16, 64), Q4_1))
    finite = product.isfinite()
    assert not finite[4].any()
    assert finite[torch.arange(9) != 4].all()


@needs_kernels
def test_rows_of_zeros_and_of_nearly_nothing_give_nearly_nothing(kernels: Kernels) -> None:
    weights = interleaved(torch.randn(16, 64), Q8_0)
    for value in (0.0, 1e-38, 3e-39):
        product = kernels.multiply(torch.full((2, 64), value, dtype=torch.bfloat16), weights)
        assert float(product.abs().max()) < 1e-35


@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_blocks_take_what_the_file_takes(kind: int) -> None:
    weight = torch.randn(32, 96)
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType(kind))
    assert interleaved(weight, kind).data.numel() == raw.size


def test_rows_that_do_not_come_to_groups_stay_as_they_are() -> None:
    blocks, _ = blocks_of(torch.randn(24, 64), Q8_0)
    assert Interleaved.of(blocks) is None
    loaded = load_kernels(cpu_flags(), torch.bfloat16)
    if isinstance(loaded, Kernels):
        assert loaded.arranged(blocks) is blocks


@needs_kernels
def test_float32_is_never_quantised() -> None:
    loaded = load_kernels(cpu_flags(), torch.float32)
    assert isinstance(loaded, Kernels)
    weight = torch.randn(16, 64)
    blocks, _ = blocks_of(weight, Q8_0)
    assert loaded.arranged(blocks) is blocks
    assert Linear(weight, keep_rows=False, blocks=blocks, kernels=loaded).integer_form is None


def load_tiny(path: Path, data_type: DataType, quantization: Quantization) -> TorchRunner:
    model = ModelConfig(
        source=ModelSource(path=str(path)), served_name="t", data_type=data_type, quantization=quantization
    )
    return assemble_runner(EngineConfig(model=model, cache=CacheConfig(capacity_bytes=1 << 20)), lambda _: None)


def logits_of(runner: TorchRunner, tokens: list[int], rows: int) -> Tensor:
    """Of each token, by steps of so many rows."""
    builder = StepBuilder(
        runner.block_tokens, runner.max_length_tokens, runner._cache.dtype, torch.device("cpu"), tile_rows=1
    )
    found = []
    for start in range(0, len(tokens), rows):
        with torch.inference_mode():
            plan = piece_plan(tokens, start, min(start + rows, len(tokens)), runner.block_tokens)
            builder.adopt(plan.table_changes)
            inputs = builder.build(plan)
            logits = runner._model.forward(inputs, runner._cache)
        found.append(logits[torch.from_numpy(inputs.sampled).argsort()])
    return torch.cat(found)


@needs_kernels
@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("mistral", {"sliding_window": 20})],
    ids=["Llama", "Qwen2: biases", "Qwen3: norms of heads", "Mistral: a window"],
)
@pytest.mark.parametrize("quantization", ["Int8", "Int4"])
def test_layers_in_one_call_are_the_same_bits(
    tmp_path: Path, family: str, config: dict[str, object], quantization: Quantization
) -> None:
    path = make_tiny_llama(tmp_path / "model", family=family, seed=7, config=config, **SHAPE)  # type: ignore[arg-type]
    runner = load_tiny(path, "BFloat16", quantization)
    model = runner._model
    assert model._stack is not None
    assert len(model._stack) == 3
    tokens = [(i * i * 31) % 256 for i in range(60)]
    stacked = {rows: logits_of(runner, tokens, rows) for rows in (1, 3, 20, 60)}
    model._stack = None
    for rows, found in stacked.items():
        assert torch.equal(found, logits_of(runner, tokens, rows))
        # A row alone and among others: attention and products know no neighbours.
        assert torch.equal(found, stacked[1])


@needs_kernels
def test_a_chunk_that_samples_once_is_the_same_bits_too(tmp_path: Path) -> None:
    """Its last layer is computed for one row alone."""
    path = make_tiny_llama(tmp_path / "model", seed=7, **SHAPE)  # type: ignore[arg-type]
    runner = load_tiny(path, "BFloat16", "Int8")
    builder = StepBuilder(runner.block_tokens, 512, runner._cache.dtype, torch.device("cpu"), tile_rows=4)
    plan = first_plan([(i * i * 31) % 256 for i in range(45)], runner.block_tokens)

    def logits() -> Tensor:
        builder.adopt(plan.table_changes)
        with torch.inference_mode():
            return runner._model.forward(builder.build(plan), runner._cache)

    found = logits()
    assert len(found) == 1
    runner._model._stack = None
    assert torch.equal(found, logits())


@needs_kernels
@pytest.mark.parametrize("quantization", ["Int8", "Int4"])
def test_a_model_is_nearly_as_exact_as_by_packed_weights(tmp_path: Path, quantization: Quantization) -> None:
    """Where the processor has matrix units, steps of more rows multiply by those."""
    path = make_tiny_llama(tmp_path / "model", seed=7, **SHAPE)  # type: ignore[arg-type]
    tokens = [(i * i * 31) % 256 for i in range(60)]
    runner = load_tiny(path, "BFloat16", quantization)
    exact = logits_of(load_tiny(path, "Float32", quantization), tokens, len(tokens))
    integers = logits_of(runner, tokens, len(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "cpu_flags", lambda: cpu_flags() | {"amx_bf16"})
        with_units = load_tiny(path, "BFloat16", quantization)
    packed = logits_of(with_units, tokens, len(tokens))
    assert torch.equal(logits_of(with_units, tokens, 32), integers)
    assert not torch.equal(packed, integers)
    # A byte has 127 steps up to the largest of 32 values, a number in bfloat16 at least 128 of its own size.
    assert float((integers - exact).abs().mean()) < 3 * float((packed - exact).abs().mean())
    assert float((integers - exact).abs().mean()) < 0.02 * float(exact.abs().max())


@needs_kernels
def test_no_quantization_multiplies_in_bfloat16(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", seed=7, **SHAPE)  # type: ignore[arg-type]
    model = load_tiny(path, "BFloat16", "None")._model
    assert model._stack is None
    assert all(layer.integer_form() is None for layer in model._layers)


@needs_kernels
def test_answers_in_integers_are_those_of_the_rounded_model(tmp_path: Path) -> None:
    """Batched, in chunks and preempted."""
    path = make_tiny_llama(tmp_path / "model", seed=5, **SHAPE)  # type: ignore[arg-type]
    runner = load_tiny(path, "BFloat16", "Int8")
    requests = [greedy(str(i), [(i * 31 + j * j) % 256 for j in range(n)]) for i, n in enumerate((1, 2, 17, 90, 40))]
    scheduler = run(runner, requests, per_request=7, num_blocks=12)
    assert scheduler.preemptions_total > 0
    reference = Reference.from_directory(path)
    for request, output in zip(requests, outputs(requests), strict=True):
        # Logits of this model lie around 10: eight bits of each activation leave a tenth or two.
        reference.assert_greedy(request.tokens[: request.num_prompt], output, tie=0.25)
