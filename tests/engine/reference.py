"""Hugging Face transformers as the reference of what a model says, and drivers that run the engine's loop to its end.

Outputs are checked by one forward pass over prompt and output: if at each position the reference's likeliest token is
the one that was produced, the reference would have produced the same text.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.scripted import make_limits
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import CacheConfig, DataType, EngineConfig, ModelConfig, ModelSource
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.host_pool import HostPool
from sluice_engine.core.link import Link
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.request import Outcome, Request, SamplingParams
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.steptime import PlanningProfile
from sluice_engine.core.suspension import SwapSpace
from sluice_engine.executor import ThreadExecutor

# Two logits this close are a tie that rounding may break either way (design: determinism).
TIE = 1e-3


class Reference:
    """A model in float32, as transformers computes it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model.eval()
        self.ties = 0
        """Tokens that differed from the reference's and were let pass as ties."""

    @classmethod
    def from_directory(cls, path: Path) -> Reference:
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    @classmethod
    def from_demo_gguf(cls, path: Path) -> Reference:
        os.environ["TQDM_DISABLE"] = "1"
        config = LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=100_000.0,
            tie_word_embeddings=True,
        )
        with torch.device("meta"):
            skeleton = LlamaForCausalLM(config)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)["tensors"]
        model = LlamaForCausalLM(config)
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        model.tie_weights()
        return cls(model)

    def logits(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits

    def assert_greedy(self, prompt: list[int], output: list[int], tie: float = TIE) -> None:
        """The output is what greedy decoding of the reference gives, ties aside."""
        logits = self.logits(prompt + output[:-1])[len(prompt) - 1 :]
        for at, (row, token) in enumerate(zip(logits, output, strict=True)):
            if int(row.argmax()) == token:
                continue
            gap = float(row.max() - row[token])
            assert gap < tie, f"output token {at} is {token}, the reference says {int(row.argmax())}, {gap:.4f} above"
            self.ties += 1


def load_runner(
    source: ModelSource,
    *,
    capacity_bytes: int = 64 << 20,
    block_tokens: int = 16,
    host_swap_bytes: int | None = None,
    data_type: DataType = "Float32",
) -> TorchRunner:
    config = EngineConfig(
        model=ModelConfig(source=source, served_name="test", data_type=data_type),
        cache=CacheConfig(capacity_bytes=capacity_bytes, block_tokens=block_tokens, host_swap_bytes=host_swap_bytes),
    )
    return assemble_runner(config, lambda _progress: None)


def greedy(name: str, prompt: list[int], max_tokens: int = 32) -> Request:
    return Request(name, list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0), 0)


def run(
    runner: TorchRunner,
    requests: list[Request],
    *,
    max_sequences: int = 16,
    token_budget: int = 512,
    chunk: int | None = None,
    per_request: int | None = None,
    num_blocks: int | None = None,
    depth: int = 0,
    prefix: bool = False,
    swap: bool = False,
    drafts: int = 0,
) -> Scheduler:
    """Add all requests, step until none is left, and return the scheduler that was used. None of them fails."""
    limits = make_limits(
        max_sequences=max_sequences,
        token_budget=token_budget,
        chunk=chunk,
        per_request=per_request,
        block_tokens=runner.block_tokens,
        promise_us=10_000_000,
    )
    pool = BlockPool(num_blocks or runner.num_blocks, runner.block_tokens)
    scheduler = Scheduler(
        limits,
        pool,
        PlanningProfile(),
        max_length_tokens=runner.max_length_tokens,
        depth=depth,
        most_drafts=drafts,
        prefix=PrefixCache(pool, enabled=prefix),
        space=SwapSpace(HostPool(runner.num_host_blocks, pool.block_tokens), Link(0, 1, 1)) if swap else None,
        policies=Policies(resume="Swap"),
    )
    ticks = iter(range(0, 1 << 62, 1000))
    executor = ThreadExecutor(runner) if depth else None
    loop = EngineLoop(scheduler, runner, lambda: next(ticks), executor=executor)
    for request in requests:
        assert loop.add(request) is None
    while loop.has_work:
        loop.step()
    if executor is not None:
        executor.close()
    for request in requests:
        assert request.outcome in {Outcome.STOP, Outcome.LENGTH}, request.error
    return scheduler


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.tokens[request.num_prompt :] for request in requests]
