"""Whether the container's memory limit holds what the manifest itself puts there.

Owns the sum. A GPU has memory of its own; without one the KV cache and the weights lie in the container's, and the
place for the KV of preempted requests always does. Pure. Next: `cli/verdict.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.resource.units import quantity_bytes


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
    """The files of the model; 0 where they are not known, or a device holds them."""

    @property
    def shortage_bytes(self) -> int:
        """How much less the limit is than what is known to be needed; what the engine takes for itself comes on top."""
        return max(0, self.cache_bytes + self.swap_bytes + self.weights_bytes - self.limit_bytes)


def host_memory(spec: ServiceSpec, weights_bytes: int | None) -> HostMemory | None:
    """What is needed beside what is allowed; None without a limit, or with one that the API server would not read."""
    limit_bytes = quantity_bytes(str(spec.resources.get("limits", {}).get("memory", "")))
    if limit_bytes is None:
        return None
    is_shared = spec.accelerator_count == 0
    return HostMemory(
        limit_bytes=limit_bytes,
        cache_bytes=(spec.cache.capacity_bytes or 0) if is_shared else 0,
        swap_bytes=spec.cache.host_swap_bytes or 0,
        weights_bytes=(weights_bytes or 0) if is_shared else 0,
    )
