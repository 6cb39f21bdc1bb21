"""GGUF's types of blocks that kernels multiply with, and what one block takes.

Without torch: whoever judges a model that is not loaded needs these numbers too.
"""

from __future__ import annotations

from sluice_engine.config import Quantization

Q4_0, Q4_1, Q8_0 = 2, 3, 8  # GGUF's numbers
WEIGHTS = 32
"""Of one row, in a block of each type."""
SCALES = {Q4_0: 1, Q4_1: 2, Q8_0: 1}
"""Types of blocks that can be multiplied with, and how many half-precision numbers each block begins with."""
ROUNDED_TO: dict[Quantization, int] = {"Int8": Q8_0, "Int4": Q4_1}
"""Types that `model.quantization` rounds to."""


def block_bytes(kind: int, scale_bytes: int) -> int:
    """Bytes of a block whose scales take so many each: 2 as in a file, 4 in float32."""
    return scale_bytes * SCALES[kind] + (WEIGHTS if kind == Q8_0 else WEIGHTS // 2)
