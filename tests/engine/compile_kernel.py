"""Compiles the attention kernel to machine code for cards that are not here: a program, since tests interpret it."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]  # it has no stubs
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]  # likewise
from triton.compiler import ASTSource, compile  # type: ignore[import-untyped]  # noqa: A004  # likewise; its own name

from sluice_engine.compute.paged_triton import _attend

# Compute capability, type, whether rows are single and whether their contexts are split, head dimension.
VARIANTS = (
    (80, "bf16", True, True, 64),
    (90, "bf16", False, False, 128),
    (90, "fp16", True, False, 96),
    (89, "fp16", False, False, 96),
)
GROUP = 4
NUMBERS = ("num_requests", "num_rows", "window", "q_row", "q_head", "token_width", "table_width")
# Ada, the smallest of the three, has 99 KiB of shared memory for a block.
MOST_SHARED_BYTES = 99 << 10


def main() -> None:
    for capability, kind, singles, split, head_dim in VARIANTS:
        tile_rows = 1 if singles else 64 // GROUP
        constants = {
            "BLOCK_TOKENS": 16,
            "GROUP": GROUP,
            "HEAD_DIM": head_dim,
            "DIM": triton.next_power_of_2(head_dim),
            "SINGLES": singles,
            "TILE_ROWS": tile_rows,
            "QUERIES": max(16, tile_rows * GROUP),
            "KEYS": 64,
            "SPLIT": split,
        }
        signature = dict.fromkeys(("q", "layer", "out"), f"*{kind}")
        signature |= dict.fromkeys(("parts", "highest", "sums"), "*fp32")
        signature |= dict.fromkeys(("tables", "lengths", "starts"), "*i32")
        signature |= {"scale": "fp32"} | dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(constants, "constexpr")
        ordered = {name: signature[name] for name in _attend.arg_names}
        source = ASTSource(fn=_attend, signature=ordered, constexprs=constants)
        options = {"num_warps": 4, "num_stages": 2}
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"], "no machine code"
        assert compiled.metadata.shared <= MOST_SHARED_BYTES, compiled.metadata.shared
        print(capability, kind, singles, split, head_dim)


if __name__ == "__main__":
    main()
