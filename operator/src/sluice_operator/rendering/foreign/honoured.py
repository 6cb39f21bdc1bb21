"""What of a spec no engine but Sluice's own can do: refused by name, since nothing is dropped silently. Pure.

A field that the API server filled in cannot be told from one that was written. So a default always passes, also where
it means nothing to the engine; `docs/engines.md` says which.
"""

from __future__ import annotations

from collections.abc import Iterator

from sluice_engine.config import CacheConfig, SchedulerConfig
from sluice_engine.live_config import LiveSchedulingConfig
from sluice_operator.resource.spec import ServiceSpec

Refusal = tuple[str, str]
"""A field's path, and what is wrong with it."""

_DEFAULTS = SchedulerConfig()
# Both preempt whom they let in last, or whoever matters least where requests have priorities.
_OWN_VICTIM = {"FirstComeFirstServed": "Last", "Priority": "LowestPriority"}


def refused(spec: ServiceSpec, engine: str) -> Iterator[Refusal]:
    """The fields that neither vLLM nor SGLang can honour; `engine` is its name for people."""
    yield from _model(spec, engine)
    scheduling = spec.scheduling
    if scheduling.policy not in _OWN_VICTIM:
        problem = f"{engine} has no policy {scheduling.policy}: choose FirstComeFirstServed or Priority"
        yield "spec.scheduling.policy", problem
    if spec.live.scheduling.aging_interval_us != LiveSchedulingConfig().aging_interval_us:
        yield "spec.scheduling.agingInterval", f"{engine} ages no request: leave it out"
    if scheduling.overlap_depth not in (None, 0, 1):
        yield "spec.scheduling.overlapDepth", f"{engine} plans one step ahead at most: set 0 or 1, or leave it out"
    own = _OWN_VICTIM.get(scheduling.policy)
    if scheduling.victim not in (_DEFAULTS.victim, own):
        problem = f"{engine} chooses its victims itself{f' ({own})' if own else ''}: leave it out"
        yield "spec.scheduling.preemption.victim", problem
    if scheduling.resume == "Swap":
        yield "spec.scheduling.preemption.resume", f"{engine} computes again what it preempted: set Recompute"
    if scheduling.max_preemptions_per_request != _DEFAULTS.max_preemptions_per_request:
        yield "spec.scheduling.preemption.maxPerRequest", f"{engine} counts no preemptions of a request: leave it out"
    if spec.cache.host_swap_bytes is not None:
        problem = f"{engine} keeps no KV of preempted requests on the host: leave it out"
        yield "spec.cache.hostSwapCapacity", problem
    yield from _refused_guesses(spec, engine)


def _refused_guesses(spec: ServiceSpec, engine: str) -> Iterator[Refusal]:
    if spec.scheduling.speculation.method != "Disabled":
        problem = f"only Sluice's own engine is told to guess: leave it out for {engine}"
        yield "spec.scheduling.speculation.method", problem


def _model(spec: ServiceSpec, engine: str) -> Iterator[Refusal]:
    source = spec.model.source
    if source.demo is not None:
        yield "spec.model.source.demo", f"is in Sluice's own image alone: name {engine}'s model by another source"
    if source.hub is not None and source.hub.file:
        yield "spec.model.source.huggingFace.file", f"{engine} is given whole repositories: leave it out"
    if spec.model.quantization != "Auto":
        problem = f"{engine} reads how a checkpoint is quantised from its files: leave it out"
        yield "spec.model.quantization", problem
    if spec.adapters.are_served:
        problem = f"only Sluice's own engine is told of adapters: leave them out for {engine}"
        yield "spec.model.adapters", problem


def block_tokens(spec: ServiceSpec) -> int | None:
    """The size of a block that was asked for; None at the default, where the engine takes what its kernels want."""
    return None if spec.cache.block_tokens == CacheConfig().block_tokens else spec.cache.block_tokens
