"""What a step's result means: progress, new tokens, ends. In bulk for decodes, one by one for what is special.

Results are settled in the order of their plans. A row whose slot has changed hands since it was planned is stale: it is
counted and never applied. Start reading at `take`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.drafts import Drafts, num_accepted
from sluice_engine.core.emissions import DecodedTokens, Emission, Emissions
from sluice_engine.core.plan import Logprob, ScheduledRequest, StepPlan, StepResult
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.request import Outcome, Request, RequestStatus
from sluice_engine.core.rows import Rows
from sluice_engine.core.running import Fault
from sluice_engine.core.suspension import Suspension
from sluice_engine.core.window import Window


class Settlement:
    """The settling half of a scheduler."""

    def __init__(
        self,
        rows: Rows,
        window: Window,
        pool: BlockPool,
        prefix: PrefixCache,
        suspension: Suspension,
        end: Callable[[str, Outcome, str | None], Request | None],
        fault: Fault,
        drafts: Drafts | None = None,
    ) -> None:
        """`end`: ends a request by its id, with an outcome and an error. `drafts`: told what came of guesses."""
        self._rows = rows
        self._window = window
        self._pool = pool
        self._prefix = prefix
        self._suspension = suspension
        self._end = end
        self._fault = fault
        self._drafts = drafts
        self.stale_results_total = 0
        # By token id: whether it ends any request so far. Only rows that sampled such a token are looked at one by one.
        self._stops: npt.NDArray[np.bool_] = np.zeros(1, dtype=bool)

    def watch(self, request: Request) -> None:
        """Know a request's stop tokens before it runs."""
        ids = request.sampling.stop_token_ids
        if not ids:
            return
        # One more than the highest: ids beyond are clipped to the last place, which stays False.
        missing = max(ids) + 2 - len(self._stops)
        if missing > 0:
            self._stops = np.concatenate([self._stops, np.zeros(missing, dtype=bool)])
        self._stops[list(ids)] = True

    def take(self, result: StepResult, now_us: int) -> Emissions:
        """Settle a result, and later ones that waited for it."""
        emissions = Emissions()
        if not self._window.take(result):
            self.stale_results_total += 1
            return emissions
        for plan, due in self._window.due():
            emissions.extend(self._settle(plan, due, now_us))
            self._pool.settled(plan.step)
            self._suspension.settled(plan.step)
        return emissions

    def _settle(self, plan: StepPlan, result: StepResult, now_us: int) -> Emissions:
        failure = result.failure
        if failure is None and len(result.token_ids) != plan.num_sampling:
            failure = f"the runner gave {len(result.token_ids)} tokens where {plan.num_sampling} were to be sampled"
        if failure is not None:
            lost = {entry.request: None for entry in plan.scheduled if self._is_current(entry)}
            lost |= dict.fromkeys(self._suspension.failed(plan.step))
            return Emissions([self._fail(request, failure) for request in lost])
        failed: list[Emission] = []
        decoded = self._settle_decodes(plan, result, now_us, failed)
        chunks = self._settle_chunks(plan, result, now_us)
        return Emissions(decoded, failed, chunks)

    def _settle_decodes(self, plan: StepPlan, result: StepResult, now_us: int, failed: list[Emission]) -> DecodedTokens:
        rows, batch = self._rows, plan.decodes
        slots, requests, starts = batch.slots, batch.requests, plan.decode_starts
        num_rows = len(slots)
        token_ids = result.token_ids[:num_rows]
        applies = rows.tenure[slots] == batch.tenures
        self.stale_results_total += num_rows - int(np.count_nonzero(applies))
        for row, error in result.errors.items():
            if row < num_rows and applies[row]:
                applies[row] = False
                failed.append(self._fail(requests[row], error))
        logprobs = {row: value for row, value in result.logprobs.items() if row < num_rows and applies[row]}
        if not applies.all():
            kept = np.flatnonzero(applies)
            slots, requests, starts, token_ids = slots[kept], requests[kept], starts[kept], token_ids[kept]
            logprobs = {int(np.searchsorted(kept, row)): value for row, value in logprobs.items()}
        told: list[Request] = requests.tolist()
        tokens: list[int] = token_ids.tolist()
        for request, token_id in zip(told, tokens, strict=True):
            request.tokens.append(token_id)
        gaps_us = now_us - rows.last_token_us[slots]
        rows.last_token_us[slots] = now_us
        may_end = self._stops.take(token_ids, mode="clip") | (starts + 1 >= rows.limit[slots])
        special = {}
        for index in sorted({*np.flatnonzero(may_end).tolist(), *logprobs}):
            try:
                special[index] = self._told(told[index], tokens[index], logprobs.get(index), int(gaps_us[index]))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is about this request
                special[index] = self._contain(told[index], error)
        return DecodedTokens(told, tokens, gaps_us, special)

    def _settle_chunks(self, plan: StepPlan, result: StepResult, now_us: int) -> list[Emission]:
        emissions = []
        row = len(plan.decodes)
        for chunk in plan.chunks:
            if self._is_current(chunk):
                try:
                    if chunk.drafts:
                        emissions += self._settle_drafts(chunk, row, result, now_us)
                    elif (emission := self._settle_chunk(chunk, row, result, now_us)) is not None:
                        emissions.append(emission)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is about this request
                    emissions.append(self._contain(chunk.request, error))
            else:
                self.stale_results_total += 1  # it ended or was preempted after this step was planned
            row += chunk.num_sampled
        return emissions

    def _settle_chunk(self, chunk: ScheduledRequest, row: int, result: StepResult, now_us: int) -> Emission | None:
        request = chunk.request
        request.num_prefilled = chunk.start + chunk.num_tokens
        self._prefix.settle(request, request.num_prefilled)
        if not chunk.samples:
            return None
        if row in result.errors:
            return self._fail(request, result.errors[row])
        request.is_decoding = True
        token_id = int(result.token_ids[row])
        request.tokens.append(token_id)
        last_us = int(self._rows.last_token_us[request.slot])
        self._rows.last_token_us[request.slot] = now_us
        if request.num_output > 1:
            return self._told(request, token_id, result.logprobs.get(row), now_us - last_us)
        request.first_token_us = now_us
        return self._told(request, token_id, result.logprobs.get(row), None)

    def _settle_drafts(self, chunk: ScheduledRequest, row: int, result: StepResult, now_us: int) -> list[Emission]:
        """The sampled tokens as far as they confirm the guesses, and the one after: as if each had its own step."""
        request, slot = chunk.request, chunk.slot
        token_ids: list[int] = result.token_ids[row : row + chunk.num_sampled].tolist()
        confirmed = num_accepted(chunk.drafts, token_ids)
        gap_us = now_us - int(self._rows.last_token_us[slot])
        self._rows.last_token_us[slot] = now_us
        emissions: list[Emission] = []
        for index, token_id in enumerate(token_ids[: confirmed + 1]):
            if row + index in result.errors:
                emissions.append(self._fail(request, result.errors[row + index]))
                break
            request.tokens.append(token_id)
            emissions.append(self._told(request, token_id, result.logprobs.get(row + index), 0 if index else gap_us))
            if emissions[-1].outcome is not None:
                break
        else:
            self._rows.start[slot] = len(request.tokens) - 1
        assert self._drafts is not None
        self._drafts.settled(request, slot, len(chunk.drafts), min(confirmed, len(emissions)))
        return emissions

    def _told(self, request: Request, token_id: int, logprob: Logprob | None, gap_us: int | None) -> Emission:
        """A request has a new token: what its caller is told, and whether that was its last."""
        if token_id in request.sampling.stop_token_ids:
            self._end(request.id, Outcome.STOP, None)
            return Emission(request, outcome=Outcome.STOP, gap_us=gap_us)
        if request.num_output >= request.sampling.max_tokens:
            self._end(request.id, Outcome.LENGTH, None)
            return Emission(request, token_id, logprob, Outcome.LENGTH, gap_us)
        return Emission(request, token_id, logprob, gap_us=gap_us)

    def _fail(self, request: Request, error: str) -> Emission:
        self._end(request.id, Outcome.FAILED, error)
        return Emission(request, outcome=Outcome.FAILED)

    def _contain(self, request: Request, error: Exception) -> Emission:
        """An impossible state while settling for one request: that request fails, and the step is settled."""
        self._fault(request, error)
        return self._fail(request, f"a fault of the scheduler: {error}")

    @staticmethod
    def _is_current(entry: ScheduledRequest) -> bool:
        request = entry.request
        return request.status is RequestStatus.RUNNING and request.incarnation == entry.incarnation
