"""Rows of a batch that attend to the paged cache where it lies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows [first, first + num_rows) of a batch: consecutive tokens of R requests, which attend to their blocks."""

    first: int
    num_rows: int
    starts: Tensor
    """[R + 1] int32: where each request's rows begin, counted from `first`, and where the last one's end."""
    lengths: Tensor
    """[R] int32: tokens that the last row of each attends to; the row before it, one less."""
    tables: Tensor
    """[R, M] int32 block ids; entries past the length are valid ids that are not read."""
    max_rows: int
    """Of one request."""

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.lengths)
