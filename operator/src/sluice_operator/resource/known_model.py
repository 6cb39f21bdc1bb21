"""What is known of a service's model before any engine has it, and what Sluice's engine would refuse at its start.

Owns the choice of what to read: a demo's shape is known, another model's is read from its headers where it lies on this
machine. The rules are the engine's own. Next: `host_memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice_engine.config import ModelSource
from sluice_engine.errors import InvalidConfig, ModelUnavailable
from sluice_engine.model_files import sources
from sluice_engine.model_files.outline import Outline, outline, read_outline
from sluice_engine.model_files.shard import Shard
from sluice_operator.rendering.foreign.runtime import is_foreign
from sluice_operator.resource.spec import ServiceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model, as far as it is known."""

    outline: Outline | None = None
    files_bytes: int = 0
    """Of the weights' files; 0 where they are not here."""
    problem: str = ""
    """Why Sluice's engine would not take the files; empty where nothing is known against them."""


def known_model(spec: ServiceSpec, here: ModelSource | None) -> KnownModel:
    """What is known of the model; `here` stands for it on this machine.

    Raises:
        ModelUnavailable: there are no such files here.
    """
    if here is None:
        return KnownModel(outline=outline(spec.model.source) if spec.model.source.demo is not None else None)
    path = sources.resolve(here)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
    try:
        return KnownModel(outline=read_outline(path), files_bytes=size)
    except ModelUnavailable as error:
        return KnownModel(files_bytes=size, problem=str(error))


def element_bytes(spec: ServiceSpec) -> int:
    """Bytes of a number of weights and KV cache at least: Auto is a type of two bytes where the hardware has one."""
    return 4 if spec.model.data_type == "Float32" else 2


def refusals(spec: ServiceSpec, known: KnownModel) -> Iterator[str]:
    """Why the engine would end at its start; nothing is said of another engine."""
    if is_foreign(spec):
        return
    if known.problem:
        yield known.problem
    if spec.accelerator_count and spec.model.quantization in {"Int8", "Int4"}:
        yield f"model.quantization is {spec.model.quantization}, which is for CPUs: leave it out for an accelerator"
    if known.outline is None:
        return
    architecture = known.outline.architecture
    try:
        Shard(size=max(1, spec.accelerator_count)).check(architecture)
    except InvalidConfig as error:
        yield f"accelerator.count {error.problem}"
    try:
        architecture.request_length_tokens(spec.model.max_length_tokens)
    except InvalidConfig as error:
        yield f"model.maxLengthTokens {error.problem}"
    block = architecture.kv_bytes_per_token(element_bytes(spec)) * spec.cache.block_tokens
    for field, size, least in (
        ("cache.capacity", spec.cache.capacity_bytes, 2 * block),  # the second is scratch
        ("cache.hostSwapCapacity", spec.cache.host_swap_bytes, block),
    ):
        if size is not None and size < least:
            of = f"{spec.cache.block_tokens} tokens of this model take {block:,}"
            yield f"{field} is {size:,} bytes, and at least {least:,} are needed, since {of}: raise it"
