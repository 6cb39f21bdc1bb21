"""The engine's live state as its own thread saw it after a step: immutable copies that other threads may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.request import RequestStatus
from sluice_engine.core.state import FinishedState, HostState, PoolState, PrefixState, RequestState, request_state
from sluice_engine.core.tuning import Tuning
from sluice_engine.serving.counters import Counters, CountersCopy
from sluice_engine.text.tokenizer import Tokenizer


class AdapterShelf(Protocol):
    """The LoRA adapters in the engine's memory, each by a key that is used once. Any thread may call."""

    def load(self, key: str, directory: Path) -> tuple[int, int]:
        """Read one; its rank and its bytes. One call at a time.

        Raises:
            AdapterRefused: it cannot be used, and why.
        """
        ...

    def size(self, key: str) -> tuple[int, int]:
        """Rank and bytes of one that is loaded; zeros of one that is gone."""
        ...

    def drop(self, key: str) -> None:
        """Free one that no request will run with any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine that can run: its loop, and what was found out while it started."""

    loop: EngineLoop
    tokenizer: Tokenizer
    tuning: Tuning
    """What it says of itself."""
    vocab_size: int
    """The model's: token ids of a prompt are below this."""
    rank_bytes: tuple[int, ...] = ()
    """Weights and KV pool of each process that computes the model."""
    model_revision: str = ""
    """The commit that a hub's model is; empty for other sources."""
    adapters: AdapterShelf | None = None
    """None where the engine knows no adapters."""
    keep: Callable[[], None]
    """Writes what was learned of step times for the next start; any thread may call it, one at a time."""
    close: Callable[[], None]
    """Frees the device."""

    @property
    def max_length_tokens(self) -> int:
        """Longest prompt + output."""
        return self.loop.scheduler.max_length_tokens

    @property
    def pool_tokens(self) -> int:
        """Tokens of the whole pool."""
        return self.loop.scheduler.pool.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One copy."""

    seq: int
    step: int
    pool: PoolState
    prefix: PrefixState
    host: HostState | None
    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    preemptions_total: int
    class_preemptions_total: int
    recomputed_tokens_total: int
    failed_steps_total: int
    stale_results_total: int
    faults_total: int
    draft_tokens_total: int
    accepted_draft_tokens_total: int
    fenced_blocks: int
    optimistic_blocks: int
    runner_us_total: int
    host_us_total: int
    last_predicted_us: int
    last_real_us: int
    requests: tuple[RequestState, ...]
    finished: tuple[FinishedState, ...]
    counters: CountersCopy


def publication_of(loop: EngineLoop, counters: Counters, seq: int) -> Publication:
    """A copy of everything as it stands; only the thread that owns the loop may ask."""
    scheduler = loop.scheduler
    drafts = scheduler.drafts
    requests = list(scheduler.requests.values())
    waiting = [request for request in requests if request.status is RequestStatus.WAITING]
    return Publication(
        seq=seq,
        step=scheduler.step,
        pool=PoolState(
            block_tokens=scheduler.pool.block_tokens,
            total_blocks=scheduler.pool.num_blocks,
            free_blocks=scheduler.pool.num_free,
            cached_blocks=scheduler.pool.num_cached,
        ),
        prefix=scheduler.prefix.state(),
        host=scheduler.suspension.state(),
        running_requests=len(requests) - len(waiting),
        waiting_requests=len(waiting),
        waiting_tokens=scheduler.waiting.waiting_tokens,
        preemptions_total=scheduler.preemptions_total,
        class_preemptions_total=scheduler.class_preemptions_total,
        recomputed_tokens_total=scheduler.recomputed_tokens_total,
        failed_steps_total=loop.failed_steps_total,
        stale_results_total=scheduler.stale_results_total,
        faults_total=scheduler.faults_total,
        draft_tokens_total=drafts.proposed_total if drafts is not None else 0,
        accepted_draft_tokens_total=drafts.accepted_total if drafts is not None else 0,
        fenced_blocks=scheduler.pool.num_fenced,
        optimistic_blocks=scheduler.window.optimistic_blocks,
        runner_us_total=loop.runner_us_total,
        host_us_total=loop.host_us_total,
        last_predicted_us=loop.last_settled.predicted_us if loop.last_settled is not None else 0,
        last_real_us=loop.last_real_us,
        requests=tuple(map(request_state, requests)),
        finished=tuple(loop.finished),
        counters=counters.copy(),
    )
