"""The demo model says what transformers says: alone, in a batch, in chunks, and after preemption."""

from __future__ import annotations

import pytest

from engine.reference import Reference, greedy, load_runner, outputs, run
from sluice_engine.config import ModelSource
from sluice_engine.core.request import Request
from sluice_engine.runner import TorchRunner
from sluice_engine.sources import resolve
from sluice_engine.tokenizer import load_tokenizer

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
    return load_runner(DEMO)


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
