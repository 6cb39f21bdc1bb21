"""Attention that reads the paged cache where it lies, for whole batches: what it is asked, and who may answer.

Owns the choice of a backend for `PagedRows`: torch's own variable-length attention where it takes a block table on this
device, else the Triton kernel of `paged_triton`. A choice by facts is not trusted: `prove` compares what a backend
computes on this very device with the reference before anything is served, and one that errs is passed over.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sluice_engine.compute.attention import plain
from sluice_engine.compute.paged_rows import PagedRows
from sluice_engine.core.fit import blocks_for
from sluice_engine.errors import InvalidConfig
from sluice_engine.model_files.architecture import Architecture

log = logging.getLogger(__name__)

SWITCH = "SLUICE_ATTENTION"
NAMES = ("varlen", "triton", "torch")
"""What the switch understands: torch's variable-length attention, the kernel, neither."""

# Blocks that cuDNN pages through, its first version that aligns causal masks to the end of a cache, and the
# architectures it does so on. Source: torch/nn/attention/varlen.py of torch 2.15, `_cudnn_rejection_reasons`.
_CUDNN_PAGES_FROM = 92_400
_CUDNN_MAJORS = (9, 10)
_CUDNN_MAX_HEAD_DIM = 128

# Of outputs near 1: two units in the last place of bfloat16's eight bits, of float16's eleven; products in float32.
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


class PagedAttention(Protocol):
    """One way to compute it."""

    name: str

    def attend(self, q: Tensor, rows: PagedRows, layer: Tensor, out: Tensor, window: int | None) -> None:
        """Queries q [T, H, D] of these rows alone, any row stride → out [T, H, D], contiguous.

        `layer`: one layer's cache [blocks × block_tokens, 2 G D]. With a `window`, each row attends to no more than the
        last so many of its tokens.
        """
        ...


class GatheredAttention:
    """The reference: request by request in float32, with every copy that the others save."""

    name = "gathered"

    def __init__(self, block_tokens: int, kv_heads: int) -> None:
        self._block_tokens = block_tokens
        self._kv_heads = kv_heads

    def attend(self, q: Tensor, rows: PagedRows, layer: Tensor, out: Tensor, window: int | None) -> None:
        """See `PagedAttention`; it waits for the device."""
        starts, lengths = rows.starts.tolist(), rows.lengths.tolist()
        for request, length in enumerate(lengths):
            first, end = starts[request], starts[request + 1]
            positions = torch.arange(length, device=layer.device)
            blocks = rows.tables[request].long()[positions // self._block_tokens]
            found = layer[blocks * self._block_tokens + positions % self._block_tokens]
            keys, values = found.view(length, 2, self._kv_heads, -1).unbind(1)
            out[first:end] = plain(q[first:end], keys, values, length - (end - first), window)


class VarlenAttention:
    """`torch.nn.attention.varlen` over a block table."""

    name = "varlen"

    def __init__(self, block_tokens: int, kv_heads: int) -> None:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  # half a second of imports that a CPU never needs

        self._attend: Callable[..., object] = varlen_attn
        self._block_tokens = block_tokens
        self._kv_heads = kv_heads

    def attend(self, q: Tensor, rows: PagedRows, layer: Tensor, out: Tensor, window: int | None) -> None:
        """See `PagedAttention`."""
        blocks = layer.view(-1, self._block_tokens, 2, self._kv_heads, q.shape[-1])
        attended = self._attend(
            q, blocks[:, :, 0], blocks[:, :, 1], rows.starts, None, rows.max_rows,
            # cuDNN wants a table of exactly as many blocks as the longest has.
            rows.tables.shape[1] * self._block_tokens,
            window_size=(-1, 0) if window is None else (window - 1, 0),
            enable_gqa=True, seqused_k=rows.lengths, block_table=rows.tables,
        )  # fmt: skip
        assert isinstance(attended, Tensor)
        out.copy_(attended)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the choice rests on."""

    dtype: torch.dtype
    head_dim: int
    block_tokens: int
    has_window: bool
    capability_major: int
    """Of the GPU's compute capability."""
    cudnn: int
    """Version as cuDNN counts it; 0 without."""
    varlen_pages: bool
    """Whether this torch's variable-length attention takes a block table."""
    has_triton: bool


def reasons_against(name: str, facts: Facts) -> list[str]:
    """Why a backend is not to be tried here; empty when it is."""
    reasons: list[str] = []
    if name == "triton" and not facts.has_triton:
        reasons.append("triton is not installed")
    if name == "varlen":
        if not facts.varlen_pages:
            reasons.append("this torch's varlen_attn takes no block table")
        if facts.dtype not in {torch.bfloat16, torch.float16}:
            reasons.append("it computes in bfloat16 and float16")
        if facts.capability_major not in _CUDNN_MAJORS or facts.cudnn < _CUDNN_PAGES_FROM:
            reasons.append("paging needs cuDNN 9.24 and a GPU of compute capability 9 or 10")
        if facts.has_window:
            reasons.append("cuDNN has no sliding window")
        if facts.head_dim > _CUDNN_MAX_HEAD_DIM or facts.head_dim % 8:
            reasons.append(f"heads of {facts.head_dim} are wider than {_CUDNN_MAX_HEAD_DIM} or no multiple of 8")
        if facts.block_tokens & (facts.block_tokens - 1):
            reasons.append(f"blocks of {facts.block_tokens} tokens are no power of two")
    return reasons


def wanted_names(switch: str) -> tuple[str, ...]:
    """Backends to try, in order, by what the switch says; empty: all.

    Raises:
        InvalidConfig: it says something else.
    """
    if switch not in {"", *NAMES}:
        raise InvalidConfig(SWITCH, f"is {switch!r} in the environment; {', '.join(NAMES)} are understood")
    return tuple(name for name in NAMES if name != "torch" and switch in {"", name})


def facts_of(shape: Architecture, dtype: torch.dtype, block_tokens: int, device: torch.device) -> Facts:
    """The facts on this machine; `device` is a GPU."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  # see VarlenAttention

    return Facts(
        dtype=dtype,
        head_dim=shape.head_dim,
        block_tokens=block_tokens,
        has_window=any(window is not None for window in shape.windows(shape.max_length_tokens)),
        capability_major=torch.cuda.get_device_capability(device)[0],
        cudnn=torch.backends.cudnn.version() or 0,  # type: ignore[no-untyped-call]  # torch's own gap
        varlen_pages={"block_table", "seqused_k"} <= set(inspect.signature(varlen_attn).parameters),
        has_triton=_has_triton(),
    )


def choose(
    names: Sequence[str], facts: Facts, make: Callable[[str], PagedAttention], proof: Callable[[PagedAttention], str]
) -> PagedAttention | None:
    """The first backend that nothing speaks against and whose `proof` finds no fault; None when there is none."""
    for name in names:
        against = reasons_against(name, facts)
        if not against:
            try:
                backend = make(name)
                fault = proof(backend)
            except Exception as error:  # noqa: BLE001  # whatever a library raises on a device it does not know
                fault = f"{type(error).__name__}: {error}"
            if not fault:
                log.info("attention: %s", name)
                return backend
            against = [fault]
        log.info("attention: not %s: %s", name, "; ".join(against))
    return None


def make_backend(name: str, shape: Architecture, block_tokens: int) -> PagedAttention:
    """A backend by its name, for this model's heads."""
    if name == "varlen":
        return VarlenAttention(block_tokens, shape.num_kv_heads)
    from sluice_engine.compute.paged_triton import TritonAttention  # noqa: PLC0415  # triton is not everywhere

    return TritonAttention(block_tokens, shape.num_kv_heads)


def prove(
    backend: PagedAttention, shape: Architecture, block_tokens: int, dtype: torch.dtype, device: torch.device
) -> str:
    """What is wrong with a backend's results for batches of this model's shape; empty when they are the reference's.

    Single rows and chunks; empty histories, odd ones, last blocks in part; each window that the model has.
    """
    windows = sorted(set(shape.windows(shape.max_length_tokens)), key=str)
    worst = 0.0
    for shares in (_SINGLES, _CHUNKS):
        for window in windows:
            worst = max(worst, error_of(backend, shares, shape, block_tokens, dtype, device, window))
    tolerance = _TOLERANCES[dtype]
    return "" if worst <= tolerance else f"its results are {worst:.2g} off, {tolerance:g} is allowed"


# (tokens before the step, tokens of the step)
_SINGLES = ((0, 1), (1, 1), (15, 1), (16, 1), (300, 1), (1023, 1))
_CHUNKS = ((0, 5), (0, 129), (37, 64), (300, 1), (511, 33))


def error_of(
    backend: PagedAttention,
    shares: Sequence[tuple[int, int]],
    shape: Architecture,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None,
) -> float:
    """The largest difference from the reference over a batch of such shares; infinite where there is no number."""
    generator = torch.Generator().manual_seed(1)
    lengths = [start + count for start, count in shares]
    counts = [count for _, count in shares]
    width = blocks_for(max(lengths), block_tokens)
    tables = torch.randperm(width * len(shares), generator=generator).to(torch.int32).view(len(shares), width)
    token_width = 2 * shape.num_kv_heads * shape.head_dim

    def filled(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(device)

    layer = filled(tables.numel() * block_tokens, token_width)
    q = filled(sum(counts), shape.num_heads, shape.head_dim)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = PagedRows(
        first=0,
        num_rows=sum(counts),
        starts=starts.to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32).to(device),
        tables=tables.to(device),
        max_rows=max(counts),
    )
    out, expected = torch.zeros_like(q), torch.zeros_like(q)
    backend.attend(q, rows, layer, out, window)
    GatheredAttention(block_tokens, shape.num_kv_heads).attend(q, rows, layer, expected, window)
    difference = float((out.float() - expected.float()).abs().max())
    return difference if difference == difference else float("inf")  # noqa: PLR0124  # NaN is no number


def _has_triton() -> bool:
    try:
        import triton  # type: ignore[import-untyped]  # noqa: F401, PLC0415  # it is asked whether it is there
    except ImportError:
        return False
    return True
