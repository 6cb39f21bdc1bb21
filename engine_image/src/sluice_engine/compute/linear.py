"""A matrix product with fixed weights, in whatever form the device multiplies fastest.

On a CPU the weights are reordered once into oneDNN's blocked layout, which is up to twice as fast as rows for the few
tokens of a decode step. One single token is the exception: it is bound by memory alone, which plain rows read half as
fast again, so both forms may be held. Where a GGUF file's own blocks can be multiplied with, they serve the few tokens:
a fraction of the bytes. In bfloat16 those products are of bytes, with activations quantised row by row, and as fast
for any number of tokens but where the processor has matrix units: then no other form is held. Results differ by
rounding alone. torch has no public name for the packed operators; its own compiler emits them for frozen models.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from sluice_engine.kernels.library import EVERY_ROW, Blocks, Interleaved, Kernels

_ops = torch.ops.mkldnn

# The hint picks the blocking: that of a decode batch, which suits prefill as well; the other way round it does not.
_BATCH_HINT = 64

# Up to this many tokens, unpacking blocks costs less than reading what they stand for (measured on two cores; bfloat16
# has less to read).
_MAX_BLOCK_ROWS = {torch.float32: 12, torch.bfloat16: 6}


class Linear:
    """x ↦ x Wᵀ + b for weights [out, in]."""

    def __init__(
        self,
        weight: Tensor,
        *,
        keep_rows: bool,
        bias: Tensor | None = None,
        blocks: Blocks | None = None,
        folded: Tensor | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """`keep_rows`: hold the plain form beside a packed one, for single tokens.

        `blocks`: the same weights for few tokens, with what is `folded` into the columns of `weight` left out.
        """
        self._kernels = kernels
        self._bias = bias
        self._blocks = kernels.arranged(blocks) if kernels is not None and blocks is not None else None
        self._max_block_rows = _MAX_BLOCK_ROWS.get(weight.dtype, 0)
        if kernels is not None and isinstance(self._blocks, Interleaved):
            self._max_block_rows = kernels.max_integer_rows
        self._folded = folded
        self._packed = self._rows = None
        if self._max_block_rows == EVERY_ROW:
            return  # no other form would ever be read
        keep_rows = keep_rows and self._blocks is None
        packs = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._packed = _ops._reorder_linear_weight(weight, _BATCH_HINT) if packs else None  # noqa: SLF001  # see above
        self._rows = weight if keep_rows or not packs else None

    @property
    def integer_form(self) -> tuple[Interleaved, Tensor | None] | None:
        """The blocks and the bias, where few tokens are multiplied in integers."""
        return (self._blocks, self._bias) if isinstance(self._blocks, Interleaved) else None

    def left_out(self, num_rows: int) -> Tensor | None:
        """What the caller has to multiply so many rows by first: [in]."""
        return self._folded if self._blocks is not None and num_rows <= self._max_block_rows else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out], contiguous."""
        if self._kernels is not None and self._blocks is not None and len(x) <= self._max_block_rows:
            return self._with_bias(self._kernels.multiply(x, self._blocks))
        if self._packed is None or (len(x) == 1 and self._rows is not None):
            assert self._rows is not None
            return linear(x, self._rows, self._bias)
        product: Tensor = _ops._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # noqa: SLF001  # see above
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """[T, out]: the residual plus the product."""
        if self._kernels is not None and self._blocks is not None and len(x) <= self._max_block_rows:
            return self._with_bias(self._kernels.multiply(x, self._blocks, residual))
        if self._packed is None or (len(x) == 1 and self._rows is not None):
            assert self._rows is not None
            return linear(x, self._rows, self._bias).add_(residual)
        total: Tensor = _ops._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")  # noqa: SLF001  # see above
        return total

    def _with_bias(self, product: Tensor) -> Tensor:
        return product if self._bias is None else product.add_(self._bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's own gap
        return False
    if dtype is torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())  # noqa: SLF001  # see above
    return dtype is torch.float32
