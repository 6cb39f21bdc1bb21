"""What each choice of `model.quantization` does: a model's perplexity on a text, against its weights in bfloat16.

The text is `texts/opticks.txt`: 10 kB of Newton's Opticks (fourth edition, 1730, public domain), in pieces of 512
tokens, each of which is predicted from those before it in its piece. Every choice is read twice: by steps of many rows,
which in float32 multiply with packed weights, and by steps of few, which multiply with blocks where there are any; a
difference between the two forms would show. In bfloat16 blocks are multiplied with quantised activations. The demo
model is a Q4_1 file: of it, `Auto` takes the weights exactly as the file says.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from report import Bar, Report, arguments
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.inputs import StepBuilder
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.compute.synthetic import piece_plan
from sluice_engine.config import CacheConfig, DataType, EngineConfig, ModelConfig, ModelSource, Quantization
from sluice_engine.text.tokenizer import load_tokenizer

TEXT = Path(__file__).parent / "texts" / "opticks.txt"
SOURCE = ModelSource(demo="smollm2-135m")
PIECE_TOKENS = 512
QUICK_TOKENS = 512
# Steps of so many rows multiply with blocks in every data type.
FEW_ROWS = 4
CHOICES: tuple[tuple[DataType, Quantization], ...] = (
    ("Float32", "None"), ("BFloat16", "None"), ("BFloat16", "Auto"), ("BFloat16", "Int8"), ("BFloat16", "Int4"),
)  # fmt: skip
# A default may be this much worse than the same weights in bfloat16.
MOST_PERCENT = 2.0


def log_probabilities(runner: TorchRunner, tokens: list[int], rows: int) -> Iterator[float]:
    """Of each token but the first, given those before it, by steps of so many rows."""
    builder = StepBuilder(
        runner.block_tokens, runner.max_length_tokens, runner._cache.dtype, torch.device("cpu"),  # noqa: SLF001  # a look inside
        tile_rows=1 if runner._model.has_kernels else None,  # noqa: SLF001  # a look inside
    )  # fmt: skip
    for start in range(0, len(tokens) - 1, rows):
        end = min(start + rows, len(tokens) - 1)
        with torch.inference_mode():
            plan = piece_plan(tokens, start, end, runner.block_tokens)
            builder.adopt(plan.table_changes)
            inputs = builder.build(plan)
            logits = runner._model.forward(inputs, runner._cache).log_softmax(-1)  # noqa: SLF001  # a look inside
        order = inputs.sampled.tolist()
        wanted = torch.tensor([tokens[start + at + 1] for at in order])
        yield from logits.gather(1, wanted[:, None])[:, 0].tolist()


def perplexity(runner: TorchRunner, tokens: list[int], rows: int) -> float:
    pieces = [tokens[at : at + PIECE_TOKENS] for at in range(0, len(tokens), PIECE_TOKENS)]
    found = [value for piece in pieces if len(piece) > 1 for value in log_probabilities(runner, piece, rows)]
    return math.exp(-sum(found) / len(found))


def main() -> int:
    args = arguments(__doc__ or "")
    tokens = load_tokenizer(SOURCE).encode(TEXT.read_text(encoding="utf-8"), add_special=False)
    tokens = tokens[:QUICK_TOKENS] if args.quick else tokens
    report = Report("perplexity", data={"text": TEXT.name, "tokens": len(tokens)})
    baseline = 0.0
    for data_type, quantization in CHOICES:
        model = ModelConfig(source=SOURCE, served_name="p", data_type=data_type, quantization=quantization)
        config = EngineConfig(model=model, cache=CacheConfig(capacity_bytes=128 << 20))
        runner = assemble_runner(config, lambda _progress: None)
        many, few = (perplexity(runner, tokens, rows) for rows in (PIECE_TOKENS, FEW_ROWS))
        runner.close()
        if (data_type, quantization) == ("BFloat16", "None"):
            baseline = many
        name = f"{data_type}, {quantization}"
        print(f"{name}: {many:.3f} in steps of {PIECE_TOKENS} rows, {few:.3f} in steps of {FEW_ROWS}", flush=True)
        report.data[name] = {"many_rows": many, "few_rows": few}
        if quantization == "Auto":
            worse = 100 * (max(many, few) / baseline - 1)
            report.bars.append(Bar("the default against bfloat16", worse, "%", MOST_PERCENT, "lower"))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
