"""Computes steps with torch: runs a plan's forward pass and samples, and has the other ranks run it too.

Owns the device's memory; what is loaded is `loading`'s, how large the pools are and who else computes `assembly`'s. It
knows no scheduling: blocks, slots and order come with the plan. Start with `TorchRunner.execute`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from sluice_engine.compute.adapters import AdapterStore
from sluice_engine.compute.attention import KVCache
from sluice_engine.compute.device import dtype_name
from sluice_engine.compute.graphs import Buffers, DecodeGraphs, Record
from sluice_engine.compute.inputs import StepBuilder
from sluice_engine.compute.loading import Loaded, Opened, out_of_memory
from sluice_engine.compute.model import Model
from sluice_engine.compute.paged_inputs import PagedBuilder
from sluice_engine.compute.ranks import Ranks
from sluice_engine.compute.sampler import NOT_FINITE, Sampler, Samples, needs_host
from sluice_engine.compute.step_inputs import StepInputs
from sluice_engine.compute.step_message import StepMessage
from sluice_engine.compute.synthetic import Pool, first_plan, synthetic_plan
from sluice_engine.compute.transfer import fetched
from sluice_engine.core.link import Link
from sluice_engine.core.plan import NO_POSITIONS, Ints, StepPlan, StepResult
from sluice_engine.errors import ModelUnavailable
from sluice_engine.kernels.library import rows_per_tile

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
        ranks: Ranks | None = None,
        weight_bytes: int = 0,
    ) -> None:
        """`ranks`: the others, if this is the first of several; `weight_bytes`: what the model takes here."""
        self._ranks = ranks
        self.memory_bytes = weight_bytes + cache.num_bytes
        """Of weights and KV pool, of this rank."""
        self.rank_bytes: tuple[int, ...] = (self.memory_bytes,)
        """The same of every rank."""
        self._model = model
        self._cache = cache
        self._host = cache.host_blocks(num_host_blocks) if num_host_blocks else None
        self._device = cache.device
        self.adapters = (
            adapters if adapters is not None else AdapterStore(model.architecture, cache.dtype, cache.device)
        )
        """What requests may run with beside the model; loaded and dropped by whoever owns their names."""
        self._builder = _builder(model, cache, max_length_tokens, self.adapters)
        # Synthetic steps have slots and sampling state of their own: they leave no trace in what is live.
        self._synthetic = _builder(model, cache, max_length_tokens, self.adapters)
        self._sampler = Sampler()
        self._graphs: DecodeGraphs | None = None
        self.largest_prefill_tokens: int | None = None
        """Prefill tokens of a step that memory was measured for; None where it was not."""
        self.num_blocks = cache.num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_tokens = cache.block_tokens
        self.max_length_tokens = max_length_tokens
        self.vocab_size = model.architecture.vocab_size
        self.description = description

    def record(self, buckets: tuple[int, ...], record: Record) -> None:
        """Run decode steps of these sizes from recordings from now on; without them where recording fails."""
        try:
            self._graphs = self.recorded(buckets, record)
        except RuntimeError as error:  # of CUDA: an operator that cannot be recorded, or no memory
            log.warning("decode steps are not recorded", extra={"error": str(error)})

    def forget_recordings(self) -> None:
        """Compute every step anew from now on."""
        self._graphs = None

    def recorded(self, buckets: tuple[int, ...], record: Record) -> DecodeGraphs:
        """Decode steps of these sizes, recorded over this cache."""
        cache = self._cache
        with torch.inference_mode(), _on(self._device):
            buffers = Buffers(
                max(buckets), self.max_length_tokens, self.block_tokens, cache.scratch_block, self._device
            )
            return DecodeGraphs(lambda inputs: self._model.forward(inputs, cache), buffers, buckets, record)

    @classmethod
    def of(cls, opened: Opened, loaded: Loaded, sizes: tuple[int, int], ranks: Ranks | None = None) -> TorchRunner:
        """A runner of so many blocks on the device and on the host, over a model that is loaded.

        Raises:
            ModelUnavailable: they do not fit.
        """
        num_blocks, num_host_blocks = sizes
        try:
            with torch.inference_mode():
                cache = KVCache(
                    loaded.model.architecture, num_blocks, opened.config.cache.block_tokens, opened.dtype, opened.device
                )
                return cls(
                    loaded.model,
                    cache,
                    opened.max_length_tokens,
                    loaded.description,
                    num_host_blocks=num_host_blocks,
                    adapters=loaded.adapters,
                    ranks=ranks,
                    weight_bytes=loaded.weight_bytes,
                )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise out_of_memory(opened.path, error) from error

    def execute(self, plan: StepPlan) -> StepResult:
        """Make the plan's copies, run the batch and sample. The plan is not empty."""
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """As `execute`; on a GPU the step is queued, and the call waits for it, if sampling needs nothing of the host.

        Steps are launched in the order of their plans, by one thread at a time; their results may wait in another.
        """
        with torch.inference_mode(), _on(self._device):
            # First of all: a later step must know the tables of requests that this one does not take down with it.
            self._builder.adopt(plan.table_changes)
            self._tell(plan, self._builder)
            self._copy(plan)
            if not len(plan.decodes) and not plan.chunks:
                return lambda: StepResult(plan.step, NO_POSITIONS)
            return self._start(plan, self._builder, self._sampler)

    def follow(self, message: StepMessage) -> None:
        """Compute what rank 0 computes now, up to where it samples."""
        builder = self._synthetic if message.synthetic else self._builder
        builder.adopt(message.table_changes)
        self._copy(message)
        if len(message.slots) or message.pieces:
            assert isinstance(builder, StepBuilder), "one rank of several reads the cache in place"
            with torch.inference_mode():
                inputs = builder.inputs(message.slots, message.starts, message.tokens, message.pieces)
                self._model.forward(self._on_scratch(inputs) if message.scratch else inputs, self._cache)

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
        with torch.inference_mode(), _on(self._device):
            self._synthetic.adopt(plan.table_changes)
            self._tell(plan, self._synthetic, scratch=True)
            self._start(plan, self._synthetic, Sampler(), scratch=True)()
        return max(1, (time.perf_counter_ns() - started) // 1000)

    def first_token(self, prompt: list[int]) -> int:
        """The likeliest token after a prompt, computed as any request's is: proof that a start has led to a model.

        It overwrites blocks: only before the first request.

        Raises:
            ModelUnavailable: what the weights give is no number.
        """
        num_tokens = min(len(prompt), self.max_length_tokens, self.num_blocks * self.block_tokens)
        plan = first_plan(prompt[:num_tokens], self.block_tokens)
        with torch.inference_mode(), _on(self._device):
            self._synthetic.adopt(plan.table_changes)
            self._tell(plan, self._synthetic)
            result = self._start(plan, self._synthetic, Sampler())()
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
        """Give the memory back, and end the other ranks."""
        if self._ranks is not None:
            self._ranks.close()
        self._model.group.leave()
        self._graphs = None
        del self._model, self._cache, self._host
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _tell(self, plan: StepPlan, builder: StepBuilder | PagedBuilder, *, scratch: bool = False) -> None:
        """Tell the other ranks what is computed next. They start at once."""
        if self._ranks is not None:
            assert isinstance(builder, StepBuilder), "one rank of several reads the cache in place"
            last_tokens = builder.last_tokens(plan.decodes.slots)
            self._ranks.tell(StepMessage.of(plan, last_tokens, synthetic=builder is self._synthetic, scratch=scratch))

    def _copy(self, step: StepPlan | StepMessage) -> None:
        if self._host is not None:
            with torch.inference_mode():
                self._host.copy_out(step.swap_out)
                self._host.copy_in(step.swap_in)

    def _on_scratch(self, inputs: StepInputs) -> StepInputs:
        """The same, writing to the block that no request owns."""
        kv_rows = inputs.kv_rows % self.block_tokens + self._cache.scratch_block * self.block_tokens
        return dataclasses.replace(inputs, kv_rows=kv_rows)

    def _start(
        self, plan: StepPlan, builder: StepBuilder | PagedBuilder, sampler: Sampler, *, scratch: bool = False
    ) -> Callable[[], StepResult]:
        try:
            inputs = builder.build(plan)
            logits = self._forward(self._on_scratch(inputs) if scratch else inputs)
        except Exception as error:
            if self._ranks is None:
                raise
            raise self._ranks.loss(error) from error
        if isinstance(builder, PagedBuilder) and not needs_host(plan):
            chosen = sampler.unseen(logits, () if plan.plain else plan.sampling())
            builder.remember_on_device(inputs, chosen)
            arrived = fetched(chosen)
            return lambda: _result(plan.step, arrived())
        samples = self._sample(plan, inputs.sampled, logits, sampler)
        order = inputs.sampled
        token_ids = np.empty(len(order), dtype=np.int64)
        token_ids[order] = samples.token_ids
        builder.remember(plan, token_ids)
        result = StepResult(
            plan.step,
            token_ids,
            {int(order[row]): value for row, value in samples.logprobs.items()},
            {int(order[row]): error for row, error in samples.errors.items()},
        )
        return lambda: result

    def _forward(self, inputs: StepInputs) -> Tensor:
        logits = self._graphs.run(inputs) if self._graphs is not None else None
        return logits if logits is not None else self._model.forward(inputs, self._cache)

    @staticmethod
    def _sample(plan: StepPlan, order: Ints, logits: Tensor, sampler: Sampler) -> Samples:
        if plan.plain:
            return sampler.likeliest(logits)
        rows = plan.sampling()
        return sampler.sample(logits, [rows[row] for row in order.tolist()])


def _builder(
    model: Model, cache: KVCache, max_length_tokens: int, adapters: AdapterStore
) -> StepBuilder | PagedBuilder:
    """Inputs as the model's attention takes them."""
    if model.reads_in_place:
        return PagedBuilder(cache.block_tokens, max_length_tokens, cache.device, adapters)
    shape = model.architecture
    return StepBuilder(
        cache.block_tokens,
        max_length_tokens,
        cache.dtype,
        cache.device,
        tile_rows=rows_per_tile(shape.num_heads // shape.num_kv_heads) if model.has_kernels else None,
        window=next((window for window in shape.windows(max_length_tokens) if window is not None), None),
        adapters=adapters,
    )


def _result(step: int, token_ids: Tensor) -> StepResult:
    """Of tokens that came without waiting: below 0 there is none."""
    found: Ints = token_ids.numpy().copy()
    failed = np.flatnonzero(found < 0)
    found[failed] = 0
    return StepResult(step, found, errors=dict.fromkeys(failed.tolist(), NOT_FINITE))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels and events of other libraries go where the thread's current device is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
