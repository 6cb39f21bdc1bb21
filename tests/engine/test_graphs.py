"""The GPU's step on a CPU: paged inputs, persistent buffers and padding, tokens that stay on the device.

Recording is a plain call here, and attention is the reference's; everything else is what runs on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.reference import Reference, greedy, outputs, run
from engine.scripted import plan_of
from sluice_engine.compute.attention import KVCache
from sluice_engine.compute.draw import keep_top_p, keep_top_p_unseen
from sluice_engine.compute.graphs import Forward, bucket_of, decode_buckets
from sluice_engine.compute.model import Model
from sluice_engine.compute.paged import GatheredAttention
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.compute.sampler import NOT_FINITE, Sampler
from sluice_engine.core.plan import DecodeBatch, ScheduledRequest, StepPlan, StepResult
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.model_files.weights import load, open_tensors
from tiny_model import make_tiny_llama

CPU = torch.device("cpu")
BLOCK_TOKENS, NUM_BLOCKS = 8, 60


def direct(forward: Forward) -> Forward:
    forward()  # a recording computes once as well, over whatever the buffers hold
    return forward


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def paged_runner(path: Path, buckets: tuple[int, ...]) -> TorchRunner:
    tensors = open_tensors(path)
    shape = tensors.architecture
    with torch.inference_mode():
        weights = load(tensors, torch.float32, CPU, lambda _: None)
        model = Model(weights, 128, None, paged=GatheredAttention(BLOCK_TOKENS, shape.num_kv_heads))
        cache = KVCache(shape, NUM_BLOCKS, BLOCK_TOKENS, torch.float32, CPU)
    runner = TorchRunner(model, cache, 128, "test", num_host_blocks=30)
    if buckets:
        runner.record(buckets, direct)
    return runner


@pytest.fixture(scope="module")
def runner(tiny: Path) -> TorchRunner:
    return paged_runner(tiny, (2, 4))


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference.from_directory(tiny)


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(10, 30),
    depth=st.integers(0, 2),
    swap=st.booleans(),
    drafts=st.sampled_from([0, 3]),
)
def test_any_schedule_gives_the_reference_s_tokens(
    runner: TorchRunner,
    reference: Reference,
    lengths: list[int],
    chunk: int,
    num_blocks: int,
    depth: int,
    swap: bool,  # noqa: FBT001
    drafts: int,
) -> None:
    prompts = [_prompt(seed % 3, length) for seed, length in enumerate(lengths)]
    requests = [greedy(str(i), prompt, max_tokens=10) for i, prompt in enumerate(prompts)]
    run(runner, requests, num_blocks=num_blocks, chunk=chunk, depth=depth, prefix=True, swap=swap, drafts=drafts)
    for prompt, output in zip(prompts, outputs(requests), strict=True):
        reference.assert_greedy(prompt, output)


def test_recorded_steps_are_played_and_larger_ones_are_computed(runner: TorchRunner, reference: Reference) -> None:
    assert runner._graphs is not None
    for number in (3, 6):
        before = runner._graphs.replays_total
        requests = [greedy(str(i), _prompt(i, 9), max_tokens=12) for i in range(number)]
        run(runner, requests, depth=1)
        assert (runner._graphs.replays_total > before) is (number <= 4)
        for request in requests:
            reference.assert_greedy(request.tokens[:9], request.tokens[9:])


def test_padding_and_measured_steps_touch_no_live_block(runner: TorchRunner) -> None:
    cache = runner._cache
    live = slice(0, cache.scratch_block * BLOCK_TOKENS)
    before = [cache.layer(index)[live].clone() for index in range(2)]
    for cell in ((1, 0, 0), (3, 0, 90), (5, 16, 100), (0, 64, 64)):
        assert runner.measure(*cell) > 0
    assert all(torch.equal(cache.layer(index)[live], kept) for index, kept in enumerate(before))


def test_what_is_drawn_does_not_depend_on_where_tokens_stay(tiny: Path, runner: TorchRunner) -> None:
    def sampled() -> list[Request]:
        params = [
            SamplingParams(max_tokens=12, temperature=0.9, seed=1),
            SamplingParams(max_tokens=12, temperature=1.3, top_p=0.8, top_k=40, seed=2),
            SamplingParams(max_tokens=12, temperature=0.7, min_p=0.05, seed=3),
            SamplingParams(max_tokens=12, temperature=0.0),
            SamplingParams(max_tokens=12, temperature=0.8, frequency_penalty=0.5, logprobs=True, seed=4),
        ]
        return [Request(str(i), _prompt(i, 9 + i), 9 + i, p, 0) for i, p in enumerate(params)]

    alone = []
    for request in sampled():
        run(runner, [request], depth=0)
        alone.append(request)
    together = sampled()
    run(paged_runner(tiny, ()), together, depth=2, chunk=7)
    assert outputs(together) == outputs(alone)


def test_a_row_that_is_not_finite_fails_alone_and_leaves_a_token(tiny: Path) -> None:
    runner = paged_runner(tiny, (2,))
    with torch.inference_mode():
        runner._model._embedding[7] = float("nan")
    good, bad = greedy("good", [1, 2, 3], 4), greedy("bad", [5, 7, 9], 4)
    for slot, request in enumerate((good, bad)):
        request.blocks = [slot]
    entries = tuple(ScheduledRequest(r, 0, slot, 0, 3, samples=True) for slot, r in enumerate((good, bad)))
    result = runner.execute(plan_of(1, *entries))
    assert result.errors == {1: NOT_FINITE}
    assert result.token_ids[1] == 0


def test_a_step_that_is_queued_waits_for_nobody_s_result(runner: TorchRunner, reference: Reference) -> None:
    """The second step begins with a token that the host has not asked for yet."""
    prompt = _prompt(3, 20)
    request = greedy("ahead", prompt, 4)
    request.blocks = list(range(4))
    first = runner.launch(plan_of(1, ScheduledRequest(request, 0, 0, 0, 20, samples=True)))
    waits: list[Callable[[], StepResult]] = [first]
    waits += [runner.launch(_decode(request, step + 2, 20 + step)) for step in range(3)]
    results = [int(wait().token_ids[0]) for wait in waits]
    reference.assert_greedy(prompt, results)


def _decode(request: Request, step: int, start: int) -> StepPlan:
    one, objects = np.zeros(1, dtype=np.int64), np.array([request], dtype=object)
    batch = DecodeBatch(
        slots=one, tenures=one, incarnations=one, requests=objects, ids=objects, plain=True, penalised=False
    )
    return StepPlan(step, decodes=batch, decode_starts=np.array([start], dtype=np.int64))


@pytest.mark.parametrize("most", [1, 2, 3, 8, 48, 100, 256, 300, 512])
def test_buckets_waste_little(most: int) -> None:
    buckets = decode_buckets(most)
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    for rows in range(1, most + 1):
        size = bucket_of(buckets, rows)
        assert size is not None
        assert rows <= size <= max(rows + 31, 1)
        assert size <= 2 * rows or rows < 8
    assert bucket_of(buckets, most + 1) is None


def test_both_ways_to_keep_the_likeliest_keep_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    probabilities = (torch.randn(6, 5000, generator=generator) * 3).softmax(-1)
    probabilities[2, :4] = 0.25
    shares = [0.1, 0.5, 0.6, 1.0, 0.99, 1e-6]
    one, other = probabilities.clone(), probabilities.clone()
    keep_top_p(one, shares)
    keep_top_p_unseen(other, shares)
    assert torch.equal(one, other)


def test_sampling_nothing_is_nothing() -> None:
    assert Sampler.unseen(torch.empty(0, 10), ()).tolist() == []
