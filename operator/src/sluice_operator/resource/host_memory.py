"""Whether the container's memory limit holds what the manifest itself puts there.

Owns the sum. A GPU has memory of its own; without one the KV cache and the weights lie in the container's, and the
place for the KV of preempted requests and the engine itself always do. Pure. Next: `cli/verdict.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_operator.rendering.foreign.runtime import is_foreign
from sluice_operator.resource.known_model import KnownModel, element_bytes
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.resource.units import quantity_bytes

# Sluice's engine without a model: Python, torch, and what steps work with. Measured with the demo model on two cores as
# what its process held beside weights, blocks and pools: 395 to 455 MiB in bfloat16, 540 MiB in float32. What is less
# here is slack, so that what is refused does not run.
ENGINE_BYTES = 350 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The container's memory, as the manifest has it."""

    limit_bytes: int
    """`resources.limits.memory`."""
    cache_bytes: int
    """`cache.capacity`; 0 where a device holds the cache."""
    swap_bytes: int
    """`cache.hostSwapCapacity`."""
    weights_bytes: int
    """What a CPU holds of the weights; 0 where that is not known, or a device holds them."""
    engine_bytes: int
    """What the engine takes for itself; 0 for one that is not ours."""
    float32_bytes: int = 0
    """How much more the weights take on a CPU that does not compute in bfloat16, where the data type is left to it."""

    @property
    def shortage_bytes(self) -> int:
        """How much less the limit is than what is known to be needed."""
        return max(0, self.cache_bytes + self.swap_bytes + self.weights_bytes + self.engine_bytes - self.limit_bytes)

    @property
    def float32_shortage_bytes(self) -> int:
        """The same where the weights are in float32 because the CPU has nothing smaller."""
        needed = self.cache_bytes + self.swap_bytes + self.weights_bytes + self.engine_bytes + self.float32_bytes
        return max(0, needed - self.limit_bytes)


def host_memory(spec: ServiceSpec, known: KnownModel) -> HostMemory | None:
    """What is needed beside what is allowed; None without a limit, or with one that the API server would not read."""
    limit_bytes = quantity_bytes(str(spec.resources.get("limits", {}).get("memory", "")))
    if limit_bytes is None:
        return None
    is_shared = spec.accelerator_count == 0
    weights_bytes = more_bytes = 0
    if is_shared:
        weights_bytes, more_bytes = _weights(spec, known)
    return HostMemory(
        limit_bytes=limit_bytes,
        cache_bytes=(spec.cache.capacity_bytes or 0) if is_shared else 0,
        swap_bytes=spec.cache.host_swap_bytes or 0,
        weights_bytes=weights_bytes,
        engine_bytes=0 if is_foreign(spec) else ENGINE_BYTES,
        float32_bytes=more_bytes,
    )


def _weights(spec: ServiceSpec, known: KnownModel) -> tuple[int, int]:
    """Bytes of the weights, and how many more in float32 where that is not chosen but may be."""
    if known.outline is None or is_foreign(spec):
        return known.files_bytes, 0
    held = known.outline.held_bytes(element_bytes(spec), spec.model.quantization)
    if spec.model.data_type != "Auto":
        return held, 0
    return held, known.outline.held_bytes(4, spec.model.quantization) - held
