"""Another engine's page in the words of our own engine's state, so that the admission decides on both alike.

Owns what is made up where an engine is silent: a boot id, a sequence number, and the requests that nobody let in.
Pure. `docs/engines.md` says what each engine cannot tell and what stands here instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_engine.core.state import (
    SCHEMA_VERSION,
    DerivedLimits,
    EngineState,
    LoadingProgress,
    PoolState,
    RequestState,
)
from sluice_sidecar.engines.learned import LearnedSteps
from sluice_sidecar.engines.reading import Facts, Reading

# Of a request that nobody explains nothing is known but that it runs: what it may hold and add.
STRANGER_TOKENS = 512
STRANGER_OUTPUT_TOKENS = 256
# Fewer blocks in use than this beyond what was estimated say nothing.
EXCESS_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """How the engine was started, where the gate was told; it goes before what the engine tells."""

    max_sequences: int | None = None
    kv_tokens: int | None = None
    chunk_tokens: int | None = None


class Told:
    """The state of one engine, page after page."""

    def __init__(self, engine: str, started: Started, default_chunk_tokens: int) -> None:
        self._engine = engine
        self._started = started
        self._default_chunk_tokens = default_chunk_tokens
        self._boots = 0
        self._seq = 0
        self._last: Reading | None = None
        self._unexplained = self._excess_blocks = 0

    def max_sequences(self, facts: Facts) -> int | None:
        """What it runs at once at most; None where nobody tells."""
        return self._started.max_sequences or facts.max_sequences

    @property
    def kv_tokens_are_set(self) -> bool:
        """Whether the size of the KV cache was told to the gate."""
        return self._started.kv_tokens is not None

    def kv_tokens(self, facts: Facts, reading: Reading) -> int | None:
        """What its KV cache holds."""
        return self._started.kv_tokens or reading.kv_tokens or facts.kv_tokens

    def loading(self, problem: str, progress: LoadingProgress | None = None) -> EngineState:
        """It is not ready, for this reason."""
        self._seq += 1
        return EngineState(
            schema_version=SCHEMA_VERSION, boot_id=self._boot_id, seq=self._seq, phase="loading",
            engine=self._engine, failure=problem, loading=progress,
        )  # fmt: skip

    def failed(self, problem: str) -> EngineState:
        """It has ended, though something of it still answers."""
        return replace(self.loading(problem), phase="failed")

    def state(
        self, facts: Facts, reading: Reading, steps: LearnedSteps, *, inside: Sequence[int]
    ) -> EngineState | None:
        """What a page says; None while it is not known how much the KV cache holds.

        `inside` is what each choice that the gate knows in the engine holds, in tokens.
        """
        kv_tokens = self.kv_tokens(facts, reading)
        if kv_tokens is None:
            return None
        if self._last is not None and reading.restarted_since(self._last):
            self._boots += 1
            self._unexplained = self._excess_blocks = 0
        if reading != self._last:
            self._seq += 1
        self._last = reading
        context_tokens = reading.context_tokens or facts.context_tokens or kv_tokens
        block_tokens = reading.block_tokens or facts.block_tokens or 1
        total_blocks = kv_tokens // block_tokens
        inside_blocks = sum(-(-tokens // block_tokens) for tokens in inside)
        used = reading.kv_used_tokens
        used_blocks = inside_blocks if used is None else -(-used // block_tokens)
        max_sequences = steps.max_sequences
        chunk_tokens = self._started.chunk_tokens or facts.chunk_tokens or self._default_chunk_tokens
        return EngineState(
            schema_version=SCHEMA_VERSION,
            boot_id=self._boot_id,
            seq=self._seq,
            phase="ready",
            engine=self._engine,
            model=facts.model,
            max_length_tokens=min(context_tokens, kv_tokens),
            pool=PoolState(
                block_tokens=block_tokens,
                total_blocks=total_blocks,
                free_blocks=max(0, total_blocks - used_blocks),
            ),
            running_requests=reading.running or 0,
            waiting_requests=reading.waiting or 0,
            preemptions_total=reading.preemptions_total or 0,
            derived=DerivedLimits(
                feasible=True,
                chunk_ceiling_tokens=chunk_tokens,
                token_budget=chunk_tokens + max_sequences,
                max_sequences=max_sequences,
                kv_capacity_tokens=kv_tokens,
            ),
            step_cost=steps.step_cost,
            prefill_cost=steps.prefill_cost,
            decode_curve_us=steps.curve_us,
            requests=self._strangers(reading, len(inside), used_blocks - inside_blocks, block_tokens),
        )

    @property
    def _boot_id(self) -> str:
        return f"{self._engine}-{self._boots}"

    def _strangers(
        self, reading: Reading, inside: int, excess_blocks: int, block_tokens: int
    ) -> tuple[RequestState, ...]:
        """What is in the engine and nobody let in, as after a start of the gate alone; or is more than was estimated.

        One page may still count a request that has just left: it takes two to say so.
        """
        more = max(0, (reading.running or 0) + (reading.waiting or 0) - inside)
        number, self._unexplained = min(more, self._unexplained), more
        excess, self._excess_blocks = min(excess_blocks, self._excess_blocks), excess_blocks
        tokens = max(0, excess) * block_tokens
        if not number:
            # Each of those inside may hold a block that was not counted; beyond, their prompts are longer than thought.
            number = int(excess > EXCESS_BLOCKS + inside)
            if not number:
                return ()
        held = tokens // number if reading.kv_used_tokens is not None else STRANGER_TOKENS
        return tuple(
            RequestState(
                id=f"unknown-{index}", choice=0, status="running", prompt_tokens=max(1, held),
                computed_tokens=max(1, held), output_tokens=1, max_tokens=STRANGER_OUTPUT_TOKENS, blocks=0,
                incarnation=0, preemptions=0,
            )
            for index in range(number)
        )  # fmt: skip
