"""What the ranks of one model say to each other within a step: sums and gathered rows. Alone, nothing.

Owns the process group. Who the ranks are and how they live and end is `ranks`; what each holds is `model_files.shard`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from sluice_engine.model_files.shard import WHOLE, Shard

# Ranks meet here only once each is loaded, and then within a step; one that has died is noticed elsewhere, at once.
_TIMEOUT = timedelta(minutes=10)


class Group:
    """One rank's end of the group. A group of one sums and gathers nothing."""

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard = shard

    @classmethod
    def joined(cls, shard: Shard, device: torch.device, store: Path) -> Group:
        """The group that meets by a file; it waits for all.

        A file in a folder of our own, and the loopback interface: no port of the pod is open to anybody.
        """
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.FileStore(str(store), shard.size),  # type: ignore[attr-defined]  # documented, in no list
            rank=shard.rank,
            world_size=shard.size,
            timeout=_TIMEOUT,
            device_id=device if cuda else None,
        )
        return cls(shard)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; every rank has it."""
        if self.shard.size > 1:
            dist.all_reduce(x)
        return x

    def beside_each_other(self, x: Tensor, width: int) -> Tensor:
        """Columns of all ranks side by side, on rank 0, up to `width`; the others keep their own.

        Ranks may have fewer columns than the first.
        """
        size = self.shard.size
        if size == 1:
            return x
        each = self.shard.vocabulary_rows(width)
        mine = torch.nn.functional.pad(x, (0, each - x.shape[1])) if x.shape[1] < each else x.contiguous()
        if self.shard.rank:
            dist.gather(mine, None, dst=0)
            return x
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.gather(mine, parts, dst=0)
        return torch.cat(parts, dim=1)[:, :width]

    def leave(self) -> None:
        """End this rank's part; the process may join another group after.

        With NCCL it is left to the end of the process: to take leave of ranks that are gone may take for good.
        """
        if self.shard.size > 1 and dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
