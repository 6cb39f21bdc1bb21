"""A matrix product with fixed weights, in whatever form the device multiplies fastest.

On a CPU the weights are reordered once into oneDNN's blocked layout, which is up to twice as fast as rows for the few
tokens of a decode step. One single token is the exception: it is bound by memory alone, which plain rows read half as
fast again, so both forms may be held. Results differ by rounding alone. torch has no public name for these operators;
its own compiler emits them for frozen models.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

_ops = torch.ops.mkldnn

# The hint picks the blocking: that of a decode batch, which suits prefill as well; the other way round it does not.
_BATCH_HINT = 64


class Linear:
    """x ↦ x Wᵀ for weights [out, in]."""

    def __init__(self, weight: Tensor, *, keep_rows: bool) -> None:
        """`keep_rows`: hold the plain form beside a packed one, for single tokens."""
        packs = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._packed = _ops._reorder_linear_weight(weight, _BATCH_HINT) if packs else None  # noqa: SLF001  # see above
        self._rows = weight if keep_rows or not packs else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out], contiguous."""
        if self._packed is None or (len(x) == 1 and self._rows is not None):
            assert self._rows is not None
            return linear(x, self._rows)
        product: Tensor = _ops._linear_pointwise(x, self._packed, None, "none", [], "")  # noqa: SLF001  # see above
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """[T, out]: the residual plus the product."""
        if self._packed is None or (len(x) == 1 and self._rows is not None):
            assert self._rows is not None
            return linear(x, self._rows).add_(residual)
        total: Tensor = _ops._linear_pointwise.binary(x, residual, self._packed, None, "add")  # noqa: SLF001  # see above
        return total


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's own gap
        return False
    if dtype is torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())  # noqa: SLF001  # see above
    return dtype is torch.float32
