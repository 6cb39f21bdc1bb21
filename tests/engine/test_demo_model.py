"""The demo model says what transformers says: alone, in a batch, in chunks, and after preemption."""

from __future__ import annotations

import pytest

from engine.reference import Reference, greedy, load_runner, outputs, run
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import ModelSource
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.model_files.sources import resolve
from sluice_engine.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

DEMO = ModelSource(demo="smollm2-135m")
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three rivers in Africa.<|im_end|>\n<|im_start|>assistant\n",
    "Il était une fois",
    "To be, or not to be, that is the question: " * 6,
    "SELECT name, count(*) FROM orders WHERE",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "A",
)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return load_runner(DEMO, host_swap_bytes=64 << 20)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(DEMO)
    return [tokenizer.encode(text, add_special=False) for text in PROMPTS]


@pytest.fixture(scope="module")
def alone(runner: TorchRunner, prompts: list[list[int]]) -> list[list[int]]:
    requests = _requests(prompts)
    for request in requests:
        run(runner, [request])
    return outputs(requests)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.from_demo_gguf(resolve(DEMO))


def _requests(prompts: list[list[int]]) -> list[Request]:
    return [greedy(f"request {i}", prompt) for i, prompt in enumerate(prompts)]


def _agrees(reference: Reference, prompts: list[list[int]], alone: list[list[int]], produced: list[list[int]]) -> None:
    """The same tokens as alone; where not, the reference must call it a tie."""
    for prompt, expected, output in zip(prompts, alone, produced, strict=True):
        if output != expected:
            reference.assert_greedy(prompt, output)
    assert reference.ties <= 1, "ties are rare; so many are a bug"


def test_alone_every_prompt_gives_the_reference_s_tokens(
    reference: Reference, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    for prompt, output in zip(prompts, alone, strict=True):
        assert len(output) == 32
        reference.assert_greedy(prompt, output)
    assert reference.ties <= 1


def test_a_batch_gives_each_request_what_it_gets_alone(
    runner: TorchRunner, reference: Reference, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    requests = _requests(prompts)
    run(runner, requests)
    _agrees(reference, prompts, alone, outputs(requests))


def test_prefill_in_pieces_of_seven_tokens_changes_nothing(
    runner: TorchRunner, reference: Reference, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    requests = _requests(prompts)
    run(runner, requests, per_request=7)
    _agrees(reference, prompts, alone, outputs(requests))


def test_a_pool_too_small_for_all_preempts_and_changes_nothing(
    runner: TorchRunner, reference: Reference, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    requests = _requests(prompts)
    scheduler = run(runner, requests, num_blocks=24)
    assert scheduler.preemptions_total > 0
    assert any(request.num_preemptions for request in requests)
    _agrees(reference, prompts, alone, outputs(requests))


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_planned_while_others_run_change_nothing(
    runner: TorchRunner, reference: Reference, prompts: list[list[int]], alone: list[list[int]], depth: int
) -> None:
    requests = _requests(prompts)
    scheduler = run(runner, requests, num_blocks=24, depth=depth)
    assert scheduler.preemptions_total > 0
    _agrees(reference, prompts, alone, outputs(requests))


@pytest.mark.parametrize("depth", [0, 1])
def test_guesses_that_are_computed_ahead_change_nothing(
    runner: TorchRunner, reference: Reference, prompts: list[list[int]], alone: list[list[int]], depth: int
) -> None:
    requests = _requests(prompts)
    scheduler = run(runner, requests, depth=depth, drafts=5)
    assert scheduler.drafts is not None
    assert 0 < scheduler.drafts.accepted_total < scheduler.drafts.proposed_total
    _agrees(reference, prompts, alone, outputs(requests))


def test_guesses_that_are_computed_ahead_change_no_draw(runner: TorchRunner, prompts: list[list[int]]) -> None:
    produced = []
    for drafts in (0, 5):
        requests = _requests(prompts)
        for number, request in enumerate(requests):
            request.sampling = SamplingParams(max_tokens=32, temperature=0.7, seed=number)
        scheduler = run(runner, requests, drafts=drafts)
        produced.append(outputs(requests))
    assert scheduler.drafts is not None
    assert scheduler.drafts.accepted_total > 0
    assert produced[0] == produced[1]


def test_state_kept_on_the_host_and_brought_back_changes_nothing(
    runner: TorchRunner, reference: Reference, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    requests = _requests(prompts)
    scheduler = run(runner, requests, num_blocks=24, swap=True, prefix=True, depth=1)
    assert scheduler.suspension.host.swaps_total > 0
    assert scheduler.recomputed_tokens_total == 0
    _agrees(reference, prompts, alone, outputs(requests))


def test_a_prefix_that_was_computed_for_others_changes_nothing(
    runner: TorchRunner, reference: Reference, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """One after another, twice over: the second time all but the last block of each prompt is found."""
    requests = [*_requests(prompts), *_requests(prompts)]
    for index, request in enumerate(requests):
        request.id, request.arrival_us = f"request {index}", index
    scheduler = run(runner, requests, max_sequences=1, prefix=True)
    again = requests[len(prompts) :]
    assert [r.num_cached_tokens for r in again] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert scheduler.prefix.hits_total >= sum(len(prompt) > 16 for prompt in prompts)
    _agrees(reference, [*prompts, *prompts], [*alone, *alone], outputs(requests))


def test_seeded_samples_are_the_same_swapped_found_and_in_pieces(runner: TorchRunner, prompts: list[list[int]]) -> None:
    def sampled() -> list[Request]:
        return [
            Request(str(i), list(prompt), len(prompt), SamplingParams(max_tokens=24, temperature=0.8, seed=i), i)
            for i, prompt in enumerate(prompts)
        ]

    undisturbed, swapped, first, found = sampled(), sampled(), sampled(), sampled()
    for request in undisturbed:
        run(runner, [request])
    scheduler = run(runner, swapped, num_blocks=24, per_request=7, swap=True)
    assert scheduler.suspension.host.swaps_total > 0
    for request in found:
        request.id, request.arrival_us = f"{request.id} again", request.arrival_us + len(prompts)
    scheduler = run(runner, [*first, *found], max_sequences=1, prefix=True)
    assert scheduler.prefix.hits_total > 0
    produced = [*outputs(swapped), *outputs(found)]
    same = [a == b for a, b in zip(produced, 2 * outputs(undisturbed), strict=True)]
    # A draw that falls on the border of two tokens is a tie, as two equal logits are.
    assert same.count(False) <= 1


def test_in_bfloat16_it_says_what_it_says_in_float32_but_for_near_ties(
    reference: Reference, prompts: list[list[int]]
) -> None:
    """Alone and in a batch: few rows take a GGUF file's own blocks, many the packed matrices."""
    runner = load_runner(DEMO, data_type="BFloat16")
    together, one_by_one = _requests(prompts), _requests(prompts[:4])
    run(runner, together)
    for request in one_by_one:
        run(runner, [request])
    for request in [*together, *one_by_one]:
        # Logits of this model lie around 20, of which bfloat16 keeps a tenth; garbage is many units off.
        (output,) = outputs([request])
        reference.assert_greedy(request.tokens[: request.num_prompt], output, tie=1.0)
