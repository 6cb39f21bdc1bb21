"""Computes steps with torch: loads the model, sizes the KV pool, runs a plan's forward pass and samples.

Owns the device's memory. It knows no scheduling: blocks, slots and order come with the plan. Start with
`TorchRunner.load`, then `execute`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sluice_engine.compute.adapters import AdapterStore
from sluice_engine.compute.attention import KVCache
from sluice_engine.compute.device import (
    choose_device,
    choose_dtype,
    cpu_flags,
    describe,
    dtype_name,
    free_memory_bytes,
    usable_cores,
)
from sluice_engine.compute.inputs import StepBuilder
from sluice_engine.compute.model import Model
from sluice_engine.compute.sampler import Sampler, Samples
from sluice_engine.compute.synthetic import Pool, first_plan, synthetic_plan
from sluice_engine.config import CacheConfig, EngineConfig, preloaded_key
from sluice_engine.core.link import Link
from sluice_engine.core.plan import NO_POSITIONS, Ints, StepPlan, StepResult
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import AdapterRefused, InvalidConfig, ModelUnavailable
from sluice_engine.kernels.library import LANES, MAX_HEAD_DIM, MAX_TILE_QUERIES, Kernels, load_kernels, rows_per_tile
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.quantization import check as check_quantization
from sluice_engine.model_files.sources import resolve
from sluice_engine.model_files.weights import Tensors, load, open_tensors
from sluice_engine.sizes import bytes_in_words

log = logging.getLogger(__name__)


class TorchRunner:
    """A model, its KV cache, and the step over both."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        max_length_tokens: int,
        description: str,
        *,
        num_host_blocks: int = 0,
        adapters: AdapterStore | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._host = cache.host_blocks(num_host_blocks) if num_host_blocks else None
        dtype, device = cache.dtype, cache.device
        self._device = device
        shape = model.architecture
        tile_rows = rows_per_tile(shape.num_heads // shape.num_kv_heads) if model.has_kernels else None
        window = next((window for window in shape.windows(max_length_tokens) if window is not None), None)
        self.adapters = adapters if adapters is not None else AdapterStore(shape, dtype, device)
        """What requests may run with beside the model; loaded and dropped by whoever owns their names."""
        # Synthetic steps have slots and sampling state of their own: they leave no trace in what is live.
        self._builder, self._measured = (
            StepBuilder(
                cache.block_tokens,
                max_length_tokens,
                dtype,
                device,
                tile_rows=tile_rows,
                window=window,
                adapters=self.adapters,
            )
            for _ in range(2)
        )
        self._sampler = Sampler()
        self.num_blocks = cache.num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_tokens = cache.block_tokens
        self.max_length_tokens = max_length_tokens
        self.vocab_size = model.architecture.vocab_size
        self.description = description

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[LoadingProgress], None]) -> TorchRunner:
        """A runner ready to execute.

        Raises:
            ModelUnavailable: missing, damaged, not supported, or too large for the memory.
            InvalidConfig: the device, type, length or cache that is asked for is not there.
        """
        device = choose_device(config.accelerator_count)
        dtype = choose_dtype(config.model.data_type, device)
        if device.type == "cpu":
            torch.set_num_threads(usable_cores())
        path = resolve(config.model.source)
        tensors = open_tensors(path)
        architecture = tensors.architecture
        max_length = _max_length(config.model.max_length_tokens, architecture)
        kernels = _kernels(architecture, dtype, device)
        quantization = config.model.quantization
        check_quantization(quantization, architecture, device)
        _check_memory(path, architecture, dtype, free_memory_bytes(device))
        try:
            with torch.inference_mode():
                weights = load(
                    tensors,
                    dtype,
                    device,
                    progress,
                    keep_blocks=isinstance(kernels, Kernels),
                    quantization=quantization,
                )
                model = Model(weights, max_length, kernels if isinstance(kernels, Kernels) else None)
                adapters = _adapters(config, architecture, dtype, device)
                num_host_blocks = _num_host_blocks(config.cache, architecture, dtype)
                free_bytes = free_memory_bytes(device)
                if device.type == "cpu":  # both pools come out of the same memory
                    free_bytes -= config.cache.host_swap_bytes or 0
                num_blocks = _num_blocks(config.cache, architecture, dtype, free_bytes)
                progress(LoadingProgress(stage="warmup"))
                cache = KVCache(architecture, num_blocks, config.cache.block_tokens, dtype, device)
                description = f"{_digest(path, tensors)}, {describe(device, dtype)}"
                path_taken = f"own kernels, {kernels.level}" if isinstance(kernels, Kernels) else "torch alone"
                if quantization != "Auto":
                    path_taken += f", weights {quantization}"
                return cls(
                    model, cache, max_length, f"{description}, {path_taken}",
                    num_host_blocks=num_host_blocks, adapters=adapters,
                )  # fmt: skip
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelUnavailable(f"{path} and its KV cache do not fit into memory: {error}", "OutOfMemory") from error

    def execute(self, plan: StepPlan) -> StepResult:
        """Make the plan's copies, run the batch and sample. The plan is not empty."""
        # First of all: a later step must know the tables of requests that this one does not take down with it.
        self._builder.adopt(plan.table_changes)
        if self._host is not None:
            with torch.inference_mode():
                self._host.copy_out(plan.swap_out)
                self._host.copy_in(plan.swap_in)
        if not len(plan.decodes) and not plan.chunks:
            return StepResult(plan.step, NO_POSITIONS)
        return self._run(plan, self._builder, self._sampler)

    def measure(self, decode_requests: int, prefill_tokens: int, context_tokens: int, start_tokens: int = 0) -> int:
        """µs of one synthetic step, sampling included.

        The decodes attend to `context_tokens` KV tokens, each to the same share (at most the model's length); the
        prefill is one chunk that begins at `start_tokens`. The step writes to the scratch block alone and reads any
        others, whatever they hold, so it may run at any time between steps.
        """
        longest = min(self.max_length_tokens, self.num_blocks * self.block_tokens)
        pool = Pool(self.num_blocks, self.block_tokens, longest)
        plan = synthetic_plan(pool, decode_requests, prefill_tokens, context_tokens, start_tokens)
        started = time.perf_counter_ns()
        self._run(plan, self._measured, Sampler(), scratch=True)
        return max(1, (time.perf_counter_ns() - started) // 1000)

    def first_token(self, prompt: list[int]) -> int:
        """The likeliest token after a prompt, computed as any request's is: proof that a start has led to a model.

        It overwrites blocks: only before the first request.

        Raises:
            ModelUnavailable: what the weights give is no number.
        """
        num_tokens = min(len(prompt), self.max_length_tokens, self.num_blocks * self.block_tokens)
        plan = first_plan(prompt[:num_tokens], self.block_tokens)
        result = self._run(plan, self._measured, Sampler())
        if result.errors:
            raise ModelUnavailable(
                f"the first token fails: {result.errors[0]}; the weights are damaged, or too large for "
                f"{dtype_name(self._cache.dtype)}",
                "ModelCorrupt",
            )
        return int(result.token_ids[0])

    def measure_link(self) -> Link | None:
        """What copies between device and host cost; None without host blocks.

        It overwrites blocks on both sides: only before the first request.
        """
        with torch.inference_mode():
            return self._host.measure() if self._host is not None else None

    def close(self) -> None:
        """Give the memory back."""
        del self._model, self._cache, self._host
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, plan: StepPlan, builder: StepBuilder, sampler: Sampler, *, scratch: bool = False) -> StepResult:
        with torch.inference_mode():
            inputs = builder.build(plan)
            if scratch:
                kv_rows = inputs.kv_rows % self.block_tokens + self._cache.scratch_block * self.block_tokens
                inputs = dataclasses.replace(inputs, kv_rows=kv_rows)
            logits = self._model.forward(inputs, self._cache)
            samples = self._sample(plan, inputs.sampled, logits, sampler)
        order = inputs.sampled
        token_ids = np.empty(len(order), dtype=np.int64)
        token_ids[order] = samples.token_ids
        builder.remember(plan, token_ids)
        return StepResult(
            plan.step,
            token_ids,
            {int(order[row]): value for row, value in samples.logprobs.items()},
            {int(order[row]): error for row, error in samples.errors.items()},
        )

    @staticmethod
    def _sample(plan: StepPlan, order: Ints, logits: Tensor, sampler: Sampler) -> Samples:
        if plan.plain:
            return sampler.likeliest(logits)
        rows = plan.sampling()
        return sampler.sample(logits, [rows[row] for row in order.tolist()])


def _check_memory(path: Path, architecture: Architecture, dtype: torch.dtype, free_bytes: int) -> None:
    """Say before minutes of reading what the kernel would say after them without a word: it kills the process."""
    needed = architecture.least_weight_values * dtype.itemsize
    if needed > free_bytes:
        needed_words, free_words = bytes_in_words(needed), bytes_in_words(free_bytes)
        raise ModelUnavailable(
            f"{path}: its weights are {needed_words} in {dtype_name(dtype)}, and {free_words} of memory are free",
            "OutOfMemory",
        )


def _adapters(
    config: EngineConfig, architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> AdapterStore:
    """The adapters that are there from the start: before the KV pool takes what memory is left."""
    store = AdapterStore(architecture, dtype, device)
    for source in config.adapters.preloaded:
        try:
            store.load(preloaded_key(source.name), Path(source.path))
        except AdapterRefused as error:
            raise ModelUnavailable(f"adapter {source.name}: {error}", "AdapterRefused") from error
    return store


def _kernels(shape: Architecture, dtype: torch.dtype, device: torch.device) -> Kernels | str:
    """Own kernels where they compute this model on this machine, or why they do not."""
    reason = None
    if device.type != "cpu":
        reason = "they compute on a CPU"
    elif any(size % LANES for size in (shape.head_dim, shape.hidden_size, shape.intermediate_size)):
        reason = f"the model has dimensions that are no multiples of {LANES}"
    elif shape.head_dim > MAX_HEAD_DIM or shape.num_heads // shape.num_kv_heads > MAX_TILE_QUERIES:
        reason = "the model's attention heads are too wide or too many for a KV head"
    if reason is None:
        return load_kernels(cpu_flags(), dtype)
    log.info("kernels: none: %s", reason)
    return reason


def _max_length(wanted: int | None, architecture: Architecture) -> int:
    if wanted is not None and wanted > architecture.max_length_tokens:
        raise InvalidConfig(
            "model.max_length_tokens", f"is {wanted}; the model's own length is {architecture.max_length_tokens}"
        )
    return wanted or architecture.max_length_tokens


def _num_blocks(cache: CacheConfig, architecture: Architecture, dtype: torch.dtype, free_bytes: int) -> int:
    """Blocks that the pool hands out; one more, for scratch, comes out of the same memory."""
    block_bytes = architecture.kv_bytes_per_token(dtype.itemsize) * cache.block_tokens
    least = 2 * block_bytes
    if cache.capacity_bytes is not None:
        if cache.capacity_bytes < least:
            raise InvalidConfig("cache.capacity_bytes", f"is {cache.capacity_bytes}; this model needs at least {least}")
        if cache.capacity_bytes > free_bytes:
            raise InvalidConfig(
                "cache.capacity_bytes", f"is {cache.capacity_bytes}; {free_bytes} bytes are free beside the weights"
            )
        return cache.capacity_bytes // block_bytes - 1
    share = free_bytes * cache.memory_percent // 100
    if share < least:
        raise InvalidConfig(
            "cache.memory_percent",
            f"{cache.memory_percent} % of the {free_bytes} bytes left beside the weights is {share}; "
            f"this model needs at least {least}",
        )
    return share // block_bytes - 1


def _num_host_blocks(cache: CacheConfig, architecture: Architecture, dtype: torch.dtype) -> int:
    wanted = cache.host_swap_bytes
    if wanted is None:
        return 0
    block_bytes = architecture.kv_bytes_per_token(dtype.itemsize) * cache.block_tokens
    free_bytes = free_memory_bytes(torch.device("cpu"))
    if wanted < block_bytes:
        raise InvalidConfig("cache.host_swap_bytes", f"is {wanted}; one block of this model is {block_bytes}")
    if wanted > free_bytes:
        raise InvalidConfig("cache.host_swap_bytes", f"is {wanted}; {free_bytes} bytes of host memory are free")
    return wanted // block_bytes


def _digest(path: Path, tensors: Tensors) -> str:
    """Words that differ for models of different shape or size."""
    shape = repr((tensors.architecture, sorted((name, tensors.num_bytes(name)) for name in tensors.names())))
    return f"{path.name} {hashlib.sha256(shape.encode()).hexdigest()[:10]}"
