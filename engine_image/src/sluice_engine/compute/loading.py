"""A model on its way from files to a device: what is asked for is checked, then weights come, then the pools' sizes.

Start with `Opened.of`, which costs no more than headers; then `Opened.load`. One rank of several loads its shard.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice_engine.calibrate import DECODE_AXIS_GPU
from sluice_engine.compute.adapters import AdapterStore
from sluice_engine.compute.device import (
    choose_device,
    choose_dtype,
    cpu_flags,
    describe,
    dtype_name,
    free_memory_bytes,
    usable_cores,
)
from sluice_engine.compute.graphs import decode_buckets
from sluice_engine.compute.group import Group
from sluice_engine.compute.model import Model
from sluice_engine.compute.paged import SWITCH, PagedAttention, choose, facts_of, make_backend, prove, wanted_names
from sluice_engine.compute.pool import NO_RESERVE, Reserve, num_blocks, num_host_blocks
from sluice_engine.config import EngineConfig, preloaded_key
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import AdapterRefused, InvalidConfig, ModelUnavailable
from sluice_engine.kernels.library import LANES, MAX_HEAD_DIM, MAX_TILE_QUERIES, Kernels, load_kernels
from sluice_engine.model_files.architecture import Architecture
from sluice_engine.model_files.quantization import check as check_quantization
from sluice_engine.model_files.shard import Shard
from sluice_engine.model_files.sources import resolve
from sluice_engine.model_files.weights import Tensors, load, open_tensors
from sluice_engine.sizes import bytes_in_words

log = logging.getLogger(__name__)

GRAPHS_SWITCH = "SLUICE_GRAPHS"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device."""

    model: Model
    adapters: AdapterStore
    description: str
    """Machine, model, data type, threads and ranks."""
    free_bytes: int
    """Left on the device beside it."""
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose headers are read, and the device that is to hold it, or this rank's shard of it."""

    path: Path
    tensors: Tensors
    shard: Shard
    device: torch.device
    dtype: torch.dtype
    max_length_tokens: int
    config: EngineConfig

    @classmethod
    def of(cls, config: EngineConfig, shard: Shard) -> Opened:
        """Everything that can be refused before minutes of reading.

        Raises:
            ModelUnavailable: missing, damaged, not supported, or too large for the memory.
            InvalidConfig: the device, type, length or split that is asked for is not there.
        """
        device = choose_device(config.accelerator_count, shard.rank)
        dtype = choose_dtype(config.model.data_type, device)
        if device.type == "cpu":
            torch.set_num_threads(max(1, usable_cores() // shard.size))
        path = resolve(config.model.source)
        tensors = open_tensors(path)
        architecture = tensors.architecture
        shard.check(architecture)
        max_length = architecture.request_length_tokens(config.model.max_length_tokens)
        check_quantization(config.model.quantization, shard.of(architecture), device)
        free_bytes = free_memory_bytes(device)
        _check_memory(path, architecture, dtype, free_bytes // (shard.size if device.type == "cpu" else 1), shard)
        return cls(path, tensors, shard, device, dtype, max_length, config)

    def load(self, progress: Callable[[LoadingProgress], None], store: Path | None = None) -> Loaded:
        """The weights; with other ranks, which meet by the file `store`, this rank's.

        Raises:
            ModelUnavailable: a tensor cannot be read, or memory runs out.
        """
        kernels = _kernels(self.shard.of(self.tensors.architecture), self.dtype, self.device)
        used = kernels if isinstance(kernels, Kernels) else None
        group = Group(self.shard) if store is None else Group.joined(self.shard, self.device, store)
        try:
            with torch.inference_mode():
                weights = load(
                    self.tensors,
                    self.dtype,
                    self.device,
                    progress,
                    keep_blocks=used is not None,
                    quantization=self.config.model.quantization,
                    shard=self.shard,
                )
                paged = self._paged()
                model = Model(weights, self.max_length_tokens, used, group, paged)
                adapters = _adapters(self.config, model.architecture, self.dtype, self.device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise out_of_memory(self.path, error) from error
        path_taken = f"own kernels, {used.level}" if used is not None else "torch alone"
        if model.has_integer_products:
            path_taken += ", products in integers"
        if paged is not None:
            path_taken = f"attention {paged.name}{', decode steps recorded' if self.buckets(model) else ''}"
        if self.config.model.quantization != "Auto":
            path_taken += f", weights {self.config.model.quantization}"
        if self.shard.size > 1:
            path_taken += f", {self.shard.size} ranks"
        description = f"{_digest(self.path, self.tensors)}, {describe(self.device, self.dtype)}, {path_taken}"
        weight_bytes = self.shard.least_weight_values(self.tensors.architecture) * self.dtype.itemsize
        if self.device.type == "cuda":
            weight_bytes = torch.cuda.memory_allocated(self.device)
        return Loaded(model, adapters, description, free_memory_bytes(self.device), weight_bytes)

    def buckets(self, model: Model) -> tuple[int, ...]:
        """Batches of decodes that are recorded: none where attention waits for the host, or where it is switched off.

        Raises:
            InvalidConfig: the switch says neither on nor off.
        """
        switch = os.environ.get(GRAPHS_SWITCH, "on")
        if switch not in {"on", "off"}:
            raise InvalidConfig(GRAPHS_SWITCH, f"is {switch!r} in the environment; on and off are understood")
        recorded = self.device.type == "cuda" and model.reads_in_place and switch == "on"
        return decode_buckets(self.most_decodes) if recorded else ()

    @property
    def most_decodes(self) -> int:
        """The largest batch of decodes that is looked for at a start."""
        return self.config.scheduling.max_sequences or DECODE_AXIS_GPU[-1]

    def _paged(self) -> PagedAttention | None:
        """Attention that reads the cache in place: on a GPU that computes alone, where one is right there."""
        if self.device.type != "cuda" or self.shard.size > 1:
            return None
        shape, block_tokens = self.tensors.architecture, self.config.cache.block_tokens
        with torch.cuda.device(self.device):
            return choose(
                wanted_names(os.environ.get(SWITCH, "")),
                facts_of(shape, self.dtype, block_tokens, self.device),
                lambda name: make_backend(name, shape, block_tokens),
                lambda backend: prove(backend, shape, block_tokens, self.dtype, self.device),
            )

    def pools(self, free_bytes: int, reserve: Reserve = NO_RESERVE) -> tuple[int, int]:
        """Blocks on the device and on the host, by the bytes that are free where the least are, and what steps need.

        All sizes are those of all ranks together: each holds its share of every block. A CPU's ranks share its memory.

        Raises:
            InvalidConfig: a pool of the size that is asked for is not there.
        """
        architecture = self.tensors.architecture
        cache = self.config.cache
        block_bytes = architecture.kv_bytes_per_token(self.dtype.itemsize) * cache.block_tokens
        host_bytes = cache.host_swap_bytes
        free_on_host = free_memory_bytes(torch.device("cpu")) if host_bytes is not None else 0
        host_blocks = num_host_blocks(host_bytes, block_bytes, free_on_host)
        if self.device.type == "cpu":  # both pools come out of the same memory
            free_bytes -= self.config.cache.host_swap_bytes or 0
        else:
            free_bytes *= self.shard.size
        return num_blocks(cache, block_bytes, free_bytes, reserve), host_blocks


def out_of_memory(path: Path, error: Exception) -> ModelUnavailable:
    """What to raise for memory that ran out at the start."""
    return ModelUnavailable(f"{path} and its KV cache do not fit into memory: {error}", "OutOfMemory")


def _check_memory(path: Path, architecture: Architecture, dtype: torch.dtype, free_bytes: int, shard: Shard) -> None:
    """Say before minutes of reading what the kernel would say after them without a word: it kills the process."""
    needed = shard.least_weight_values(architecture) * dtype.itemsize
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


def _digest(path: Path, tensors: Tensors) -> str:
    """Words that differ for models of different shape or size."""
    shape = repr((tensors.architecture, sorted((name, tensors.num_bytes(name)) for name in tensors.names())))
    return f"{path.name} {hashlib.sha256(shape.encode()).hexdigest()[:10]}"
