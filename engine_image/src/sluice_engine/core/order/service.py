"""What a request still costs, from step times: estimates to sort by, and lower bounds to give up by.

Both are prices for a request that runs alone: no request is ever faster than that.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice_engine.core.request import Request

StepUs = Callable[[int, int], int]
"""Median µs of a step with so many decodes and so many prefill tokens, over an empty cache."""


class Service:
    """The time a request needs once it has started."""

    def __init__(
        self,
        step_us: StepUs,
        prefill_step_tokens: int,
        *,
        cached_tokens: Callable[[Request], int] = lambda _request: 0,
    ) -> None:
        """`prefill_step_tokens`: most prefill that one request gets in a step when nothing else runs.

        `cached_tokens`: tokens of the request whose KV would be found in the prefix cache now.
        """
        assert prefill_step_tokens >= 1, "a step that takes no prefill never ends one"
        self.prefill_step_tokens = prefill_step_tokens
        self._step_us = step_us
        self._cached_tokens = cached_tokens

    def prefill_us(self, num_tokens: int) -> int:
        """The least time for computing this many tokens: full steps, then the rest."""
        full, rest = divmod(num_tokens, self.prefill_step_tokens)
        total = full * self._step_us(0, self.prefill_step_tokens) if full else 0
        return total + (self._step_us(0, rest) if rest else 0)

    def work_us(self, request: Request) -> int:
        """Estimate of all that is left: known tokens to compute, then the expected output, one token a step."""
        left = request.num_tokens - request.num_computed
        return self.prefill_us(left) + (output_left(request) - 1) * self._step_us(1, 0)

    def latest_start_us(self, request: Request) -> int | None:
        """The last moment at which it can start and still meet its deadlines; None without a deadline.

        The bound is optimistic: the request runs alone, finds all that is cached now, and ends with its next token
        unless a length was predicted for it.
        """
        first, finish = request.first_token_deadline_us, request.finish_deadline_us
        if request.num_output:
            first = None  # it came long ago
        if first is None and finish is None:
            return None
        left = request.num_tokens - request.num_computed
        next_token_us = self.prefill_us(max(1, left - self._cached_tokens(request)))
        latest = [] if first is None else [first - next_token_us]
        if finish is not None:
            more = output_left(request) - 1 if request.expected_output_tokens is not None else 0
            latest.append(finish - next_token_us - more * self._step_us(1, 0))
        return min(latest)


def output_left(request: Request) -> int:
    """Output tokens still expected; at least one, for a request that has outlived its prediction."""
    expected = request.sampling.max_tokens if request.expected_output_tokens is None else request.expected_output_tokens
    return max(1, expected - request.num_output)
