"""A matrix product with fixed weights, in whatever form the device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """x ↦ x Wᵀ for weights [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]"""
        return linear(x, self._weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """[T, out]: the residual plus the product."""
        return torch.addmm(residual, x, self._weight.t())
