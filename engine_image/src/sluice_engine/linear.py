"""A matrix product with fixed weights, in whatever form the device multiplies fastest.

On a CPU the weights are reordered once into oneDNN's blocked layout, which is up to twice as fast as rows for the few
tokens of a decode step. Results differ from those of the plain form by rounding alone. torch has no public name for
these operators; its own compiler emits them for frozen models.
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

    def __init__(self, weight: Tensor) -> None:
        self._is_packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight = _ops._reorder_linear_weight(weight, _BATCH_HINT) if self._is_packed else weight  # noqa: SLF001  # see above

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out], contiguous."""
        if self._is_packed:
            product: Tensor = _ops._linear_pointwise(x, self._weight, None, "none", [], "")  # noqa: SLF001  # see above
            return product
        return linear(x, self._weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """[T, out]: the residual plus the product."""
        if self._is_packed:
            total: Tensor = _ops._linear_pointwise.binary(x, residual, self._weight, None, "add")  # noqa: SLF001  # see above
            return total
        return torch.addmm(residual, x, self._weight.t())


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's own gap
        return False
    if dtype is torch.bfloat16:
        return bool(_ops._is_mkldnn_bf16_supported())  # noqa: SLF001  # see above
    return dtype is torch.float32
