"""Copies between host and device that nobody waits for: out of and into pinned memory, in the order of the stream.

On a CPU there is no other side: what is sent is the array's own memory, and what is fetched is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sluice_engine.core.plan import Ints


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. torch keeps the pinned memory until the copy has read it."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def sent_together(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Whole numbers in one copy, as views: each copy costs the same few microseconds, however little it takes."""
    together = sent(torch.from_numpy(np.concatenate(arrays)), device)
    return list(torch.split(together, [len(array) for array in arrays]))


def fetched(values: Tensor) -> Callable[[], Tensor]:
    """Start a device tensor on its way; the call waits for it, and for nothing that was queued after it."""
    if values.device.type == "cpu":
        return lambda: values
    landed = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    landed.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own gap
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return landed

    return wait
