"""The next token of each sampling row, from its logits.

Owns the order of what is done to a row; knows no model. The order is: penalties, bias, what a grammar or `min_tokens`
does not let come, then a draw (`draw`), or for a row without randomness the likeliest token. Frequency and presence
penalties count output tokens, the repetition penalty prompt and output.

Log probabilities that are reported are the model's own: of the raw logits, before any of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sluice_engine.compute.draw import draw
from sluice_engine.compute.transfer import sent
from sluice_engine.core.constraint import ConstraintBroken
from sluice_engine.core.plan import Logprob, ScheduledRequest, StepPlan
from sluice_engine.core.request import Request

NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Samples:
    """What came of each row of logits."""

    token_ids: list[int]
    logprobs: dict[int, Logprob]
    """Row → log probability of its token, where it is wanted."""
    errors: dict[int, str]
    """Row → why it has no token; what stands there means nothing."""


class Sampler:
    """Samples batches; remembers token counts of running requests that are penalised for them."""

    def __init__(self) -> None:
        self._counts: dict[int, _TokenCounts] = {}

    def sample(self, logits: Tensor, entries: Sequence[ScheduledRequest]) -> Samples:
        """One token for each row of logits [S, V] (float32), or an error for a row that is not finite."""
        finite = _finite(logits)
        reported = [i for i, entry in enumerate(entries) if entry.request.sampling.logprobs]
        # Before the rows are changed in place.
        raw = logits[reported].log_softmax(-1) if reported else None

        broken: dict[int, str] = {}
        for row, entry in enumerate(entries):
            if entry.request.sampling.adjusted and finite[row]:
                self._adjust(logits[row], entry)
                # Penalties divide and subtract: what they make of a row is checked as the model's own rows are.
                finite[row] = bool(logits[row].sum().isfinite())
                try:
                    _limit(logits[row], entry)
                except ConstraintBroken as error:
                    broken[row] = str(error)
        chosen = logits.argmax(-1)
        drawn = [i for i, entry in enumerate(entries) if not entry.request.sampling.greedy and finite[i]]
        if drawn:
            whole = len(drawn) == len(entries)
            rows = logits if whole else logits[drawn]
            chosen[drawn] = draw(rows, [entries[i] for i in drawn])
        samples = _checked(chosen, finite, logits.shape[-1])
        samples.errors.update((row, error) for row, error in broken.items() if row not in samples.errors)
        _follow(samples, entries)
        if raw is not None:
            wanted = [entries[row].request.sampling.top_logprobs for row in reported]
            told = _logprobs(raw, [samples.token_ids[row] for row in reported], wanted)
            samples.logprobs.update(
                (row, logprob) for row, logprob in zip(reported, told, strict=True) if row not in samples.errors
            )
        return samples

    @staticmethod
    def likeliest(logits: Tensor) -> Samples:
        """As `sample`, for requests that all take the likeliest token and want nothing else."""
        return _checked(logits.argmax(-1), _finite(logits), logits.shape[-1])

    @staticmethod
    def unseen(logits: Tensor, entries: Sequence[ScheduledRequest]) -> Tensor:
        """As `sample`, for requests without `needs_host`, and without waiting: [S] on the device, −1 for an error.

        No entries: all take the likeliest.
        """
        chosen = logits.argmax(-1)
        drawn = [i for i, entry in enumerate(entries) if not entry.request.sampling.greedy]
        if drawn and len(drawn) == len(entries):
            chosen = draw(logits, entries)
        elif drawn:
            at = sent(torch.tensor(drawn), logits.device)
            chosen.index_copy_(0, at, draw(logits.index_select(0, at), [entries[i] for i in drawn]))
        right = logits.sum(-1).isfinite() & (chosen < logits.shape[-1])
        return chosen.where(right, -1)

    def _adjust(self, row: Tensor, entry: ScheduledRequest) -> None:
        if entry.request.sampling.penalised:
            self._penalise(row, entry)
        if bias := entry.request.sampling.logit_bias:
            ids, values = zip(*bias, strict=True)
            row[list(ids)] += torch.tensor(values, dtype=row.dtype, device=row.device)

    def _penalise(self, row: Tensor, entry: ScheduledRequest) -> None:
        counts = self._counts.get(entry.slot)
        if counts is None or counts.request is not entry.request:
            counts = self._counts[entry.slot] = _TokenCounts(entry.request, len(row), row.device)
        counts.catch_up()
        sampling = entry.request.sampling
        if sampling.repetition_penalty != 1.0:
            factor = sampling.repetition_penalty
            penalised = torch.where(row > 0, row / factor, row * factor)
            row.copy_(torch.where(counts.seen, penalised, row))
        row -= sampling.frequency_penalty * counts.output
        row -= sampling.presence_penalty * (counts.output > 0)


class _TokenCounts:
    """How often a request has produced each token, kept while its slot stays its own."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        self.request = request
        self.output = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        """Occurrences among output tokens."""
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        """Occurs in prompt or output."""
        self.seen[torch.tensor(request.tokens[: request.num_prompt], device=device)] = True
        self._counted = request.num_prompt

    def catch_up(self) -> None:
        """Count what was produced since the last call; tokens are only ever appended."""
        fresh = self.request.tokens[self._counted :]
        self._counted += len(fresh)
        if fresh:
            ids = torch.tensor(fresh, device=self.output.device)
            self.output.index_add_(0, ids, torch.ones(len(fresh), device=self.output.device))
            self.seen[ids] = True


def needs_host(plan: StepPlan) -> bool:
    """Whether sampling waits for the device: something is reported, limited, counted, or compared with guesses."""
    if plan.plain and not plan.draft_tokens:
        return False
    wanted = (entry.request.sampling for entry in plan.sampling())
    return bool(plan.draft_tokens) or any(sampling.logprobs or sampling.adjusted for sampling in wanted)


def _finite(logits: Tensor) -> list[bool]:
    """Rows that hold numbers only: one NaN or infinity makes the sum one, and finite logits cannot overflow theirs."""
    finite: list[bool] = logits.sum(-1).isfinite().tolist()
    return finite


def _checked(chosen: Tensor, finite: list[bool], vocab_size: int) -> Samples:
    """Never let out what is no token: the next step would read beyond the embedding, for the whole batch."""
    token_ids: list[int] = chosen.tolist()
    errors = {}
    for row, (token_id, is_finite) in enumerate(zip(token_ids, finite, strict=True)):
        if not is_finite or not 0 <= token_id < vocab_size:
            token_ids[row], errors[row] = 0, NOT_FINITE
    return Samples(token_ids, {}, errors)


def _limit(row: Tensor, entry: ScheduledRequest) -> None:
    """Take away, in place, what may not come: what no grammar has here, and what would end a request too early.

    Raises:
        ConstraintBroken: of its grammar.
    """
    request, sampling = entry.request, entry.request.sampling
    position = entry.start + entry.num_tokens - request.num_prompt
    if request.constraint is not None:
        mask = np.frombuffer(request.constraint.mask(position, request.tokens[request.num_prompt :]), dtype=np.uint8)
        allowed = torch.zeros(len(row), dtype=torch.bool)
        bits = torch.from_numpy(np.unpackbits(mask, count=min(len(row), 8 * len(mask)), bitorder="little"))
        allowed[: len(bits)] = bits.bool()
        row.masked_fill_(~allowed.to(row.device), -math.inf)
    if sampling.stop_token_ids and position < sampling.min_tokens:
        ends = list(sampling.stop_token_ids)
        held = row[ends]
        row[ends] = -math.inf
        if request.constraint is not None and not bool(row.isfinite().any()):
            row[ends] = held  # a grammar that has come to its end has the last word


def _follow(samples: Samples, entries: Sequence[ScheduledRequest]) -> None:
    """Tell grammars what was taken."""
    for row, entry in enumerate(entries):
        constraint = entry.request.constraint
        if constraint is not None and row not in samples.errors:
            try:
                constraint.took(samples.token_ids[row])
            except ConstraintBroken as error:
                samples.token_ids[row], samples.errors[row] = 0, str(error)


def _logprobs(raw: Tensor, token_ids: list[int], wanted: list[int]) -> list[Logprob]:
    """Of each row [R, V], that of its token, and the likeliest so many."""
    values: list[float] = raw.gather(1, torch.tensor(token_ids, device=raw.device)[:, None])[:, 0].tolist()
    most = min(max(wanted), raw.shape[-1])
    if not most:
        return [Logprob(value) for value in values]
    highest = raw.topk(most, dim=-1)
    tops = zip(highest.indices.tolist(), highest.values.tolist(), strict=True)
    return [
        Logprob(value, tuple(zip(ids[:count], likeliest[:count], strict=True)))
        for value, count, (ids, likeliest) in zip(values, wanted, tops, strict=True)
    ]
