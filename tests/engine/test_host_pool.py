"""State that is swapped out: where it is kept, which copies move it, and that no copy meets another's block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scripted import make_request
from sluice_engine.compute.host_blocks import HostBlocks
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.host_pool import HostPool
from sluice_engine.core.link import Link
from sluice_engine.core.request import Request

BLOCK_TOKENS = 4


def running(blocks: list[int], num_computed: int) -> Request:
    request = make_request("A", 40, 10)
    request.blocks, request.num_computed = list(blocks), num_computed
    return request


def test_a_request_is_copied_out_as_far_as_it_was_computed_and_back_into_the_blocks_it_gets() -> None:
    host = HostPool(8, BLOCK_TOKENS)
    request = running([5, 3, 9, 7], 10)

    out = host.swap_out(request)

    assert out == ((5, 0), (3, 1), (9, 2)), "the fourth block holds nothing yet"
    assert (host.num_free, host.swaps_total, host.blocks_out_total) == (5, 1, 3)
    request.blocks = [1, 2, 4, 6]
    assert host.swap_in(request, first=0, step=7) == ((1, 0), (2, 1), (4, 2))
    assert (request.host_blocks, host.num_free, host.blocks_in_total) == ([], 5, 3)
    host.settled(7)
    assert host.num_free == 8


def test_what_the_prefix_cache_still_holds_is_not_copied_back() -> None:
    host = HostPool(8, BLOCK_TOKENS)
    request = running([5, 3, 9], 10)
    host.swap_out(request)
    request.blocks = [5, 3, 6]

    assert host.swap_in(request, first=2, step=7) == ((6, 2),)


def test_host_blocks_are_not_given_away_in_the_step_that_reads_them() -> None:
    host = HostPool(2, BLOCK_TOKENS)
    first, second = running([0, 1], 8), running([2, 3], 8)
    host.swap_out(first)
    first.blocks = [4, 5]
    host.swap_in(first, first=0, step=7)

    assert not host.room_for(second.num_computed), "all copies out come before all copies in"
    host.settled(7)
    assert host.swap_out(second) == ((2, 0), (3, 1))


@pytest.mark.parametrize(
    ("num_computed", "room"),
    [
        pytest.param(8, True, id="as-much-as-the-budget"),
        pytest.param(9, False, id="one-token-more-than-the-budget"),
        pytest.param(0, False, id="nothing-to-keep"),
    ],
)
def test_room_on_the_host(num_computed: int, room: bool) -> None:  # noqa: FBT001
    host = HostPool(2, BLOCK_TOKENS)
    request = running([0, 1, 2], num_computed)

    assert host.room_for(num_computed) is room
    if not room:
        with pytest.raises(RuntimeError, match="cannot be swapped out"):
            host.swap_out(request)
        assert host.num_free == 2


def test_a_request_is_not_swapped_out_twice() -> None:
    host = HostPool(4, BLOCK_TOKENS)
    request = running([0, 1], 8)
    host.swap_out(request)

    with pytest.raises(RuntimeError, match="cannot be swapped out"):
        host.swap_out(request)


def test_what_ended_while_it_was_swapped_out_gives_its_blocks_back() -> None:
    host = HostPool(4, BLOCK_TOKENS)
    request = running([0, 1], 8)
    host.swap_out(request)

    host.drop(request)
    host.drop(request)

    assert host.num_free == 4


def test_a_link_counts_its_fixed_part_once_a_copy_and_nothing_for_none() -> None:
    link = Link(fixed_us=100, out_ns_per_block=1500, in_ns_per_block=2500)

    assert (link.out_us(3), link.in_us(3)) == (105, 108)
    assert (link.out_us(0), link.in_us(0)) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), staged=st.booleans(), num_layers=st.integers(1, 3))
def test_copies_move_whole_blocks_of_all_layers_and_touch_no_other(
    data: st.DataObject,
    staged: bool,  # noqa: FBT001
    num_layers: int,
) -> None:
    """Against lists, over any pairs, with blocks gathered first as on a GPU and without."""
    num_device, num_host, width = 7, 6, 3
    layers = [torch.rand(num_device * BLOCK_TOKENS, width) for _ in range(num_layers)]
    host = HostBlocks(layers, num_host, BLOCK_TOKENS)
    host._staged, host._most_staged = staged, data.draw(st.integers(1, 4))
    blocks = [layer.view(num_device, -1).tolist() for layer in layers]
    kept: list[list[list[float]]] = [[[0.0] * BLOCK_TOKENS * width] * num_host for _ in layers]
    for way in data.draw(st.lists(st.sampled_from(["out", "in"]), max_size=4)):
        count = data.draw(st.integers(0, num_host))
        devices = data.draw(st.permutations(range(num_device)))[:count]
        hosts = data.draw(st.permutations(range(num_host)))[:count]
        copies = tuple(zip(devices, hosts, strict=True))
        (host.copy_out if way == "out" else host.copy_in)(copies)
        for layer in range(num_layers):
            for device, place in copies:
                if way == "out":
                    kept[layer][place] = blocks[layer][device]
                else:
                    blocks[layer][device] = kept[layer][place]
    assert [layer.view(num_device, -1).tolist() for layer in layers] == blocks
    assert host._memory.transpose(0, 1).tolist() == kept


def test_a_link_is_measured_both_ways() -> None:
    link = HostBlocks([torch.zeros(8 * BLOCK_TOKENS, 64)], 4, BLOCK_TOKENS).measure()

    assert link.fixed_us >= 0
    assert link.out_ns_per_block > 0
    assert link.in_ns_per_block > 0


def test_the_two_pools_know_nothing_of_each_other() -> None:
    """Ids of both run from 0: what is held in one says nothing about the other."""
    device, host = BlockPool(4, BLOCK_TOKENS), HostPool(4, BLOCK_TOKENS)
    request = running([], 0)
    assert device.grow(request.blocks, 8)
    request.num_computed = 8
    host.swap_out(request)
    device.release(request.blocks)

    assert (device.num_free, host.num_free) == (4, 2)
