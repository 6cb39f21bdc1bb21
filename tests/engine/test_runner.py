"""Tiny random models: what the runner says equals transformers, whatever the batch, the blocks and the order."""

from __future__ import annotations

import asyncio
import random
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.reference import Reference, greedy, load_runner, outputs, run
from engine.scripted import plan_of
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.model import Model
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.config import CacheConfig, EngineConfig, ModelConfig, ModelSource
from sluice_engine.core.constraint import Constraint
from sluice_engine.core.fit import blocks_for
from sluice_engine.core.host_pool import Copies
from sluice_engine.core.plan import ScheduledRequest, StepPlan
from sluice_engine.core.request import Request, SamplingParams
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import InvalidConfig, ModelUnavailable
from sluice_engine.model_files.weights import LayerWeights, load, open_tensors
from sluice_engine.protocol.structure import Structure
from sluice_engine.text.grammars import Grammars
from sluice_engine.text.tokenizer import load_tokenizer
from tiny_model import VOCAB_SIZE, make_tiny_llama


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runner(tiny: Path) -> TorchRunner:
    return load_runner(ModelSource(path=str(tiny)), capacity_bytes=1 << 20, block_tokens=8, host_swap_bytes=1 << 19)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference.from_directory(tiny)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tied_head": True}, id="a head tied to the embedding"),
        pytest.param({"tied_head": False}, id="a head of its own"),
        pytest.param({"num_shards": 3, "tied_head": False}, id="three shards"),
        pytest.param({"num_heads": 8, "num_kv_heads": 8}, id="a KV head for every head"),
        pytest.param({"num_heads": 4, "num_kv_heads": 1}, id="one KV head for all"),
        pytest.param({"num_layers": 1}, id="one layer, which is also the last"),
        pytest.param(
            {"config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}}, id="linearly scaled rotary embedding"
        ),
        pytest.param(
            {
                "config": {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64,
                    }
                }
            },
            id="rotary embedding scaled as in Llama 3",
        ),
    ],
)
def test_every_kind_of_llama_says_what_transformers_says(tmp_path: Path, options: dict[str, object]) -> None:
    path = make_tiny_llama(tmp_path / "model", seed=3, **options)  # type: ignore[arg-type]  # a table of keywords
    runner = load_runner(ModelSource(path=str(path)), capacity_bytes=1 << 20)
    reference = Reference.from_directory(path)
    prompts = [_prompt(seed, length) for seed, length in enumerate((1, 2, 17, 100))]
    requests = [greedy(str(i), prompt) for i, prompt in enumerate(prompts)]
    run(runner, requests)
    for prompt, output in zip(prompts, outputs(requests), strict=True):
        reference.assert_greedy(prompt, output)
    assert reference.ties == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(10, 30),
    max_sequences=st.integers(1, 8),
    token_budget=st.integers(8, 64),
    depth=st.integers(0, 2),
    prefix=st.booleans(),
    swap=st.booleans(),
)
def test_any_schedule_gives_the_reference_s_tokens(
    runner: TorchRunner,
    reference: Reference,
    lengths: list[int],
    chunk: int,
    num_blocks: int,
    max_sequences: int,
    token_budget: int,
    depth: int,
    prefix: bool,  # noqa: FBT001
    swap: bool,  # noqa: FBT001
) -> None:
    prompts = [_prompt(seed % 3, length) for seed, length in enumerate(lengths)]
    requests = [greedy(str(i), prompt, max_tokens=12) for i, prompt in enumerate(prompts)]
    run(
        runner,
        requests,
        num_blocks=num_blocks,
        chunk=chunk,
        max_sequences=max_sequences,
        token_budget=max(token_budget, max_sequences),
        depth=depth,
        prefix=prefix,
        swap=swap,
    )
    for prompt, output in zip(prompts, outputs(requests), strict=True):
        reference.assert_greedy(prompt, output)


def test_sampling_depends_on_a_request_s_own_history_alone(runner: TorchRunner) -> None:
    def sampled() -> list[Request]:
        params = [
            SamplingParams(max_tokens=16, temperature=0.9, seed=1),
            SamplingParams(max_tokens=16, temperature=1.3, top_p=0.8, seed=2),
            SamplingParams(max_tokens=16, temperature=0.7, top_k=20, min_p=0.02, seed=3),
            SamplingParams(max_tokens=16, temperature=1.0, seed=1, choice=1),
            SamplingParams(max_tokens=16, temperature=0.8, frequency_penalty=0.7, presence_penalty=0.3, seed=5),
            SamplingParams(max_tokens=16, temperature=0.8, repetition_penalty=1.3, seed=6),
        ]
        return [
            Request(str(i), _prompt(i, 20), 20, sampling, 0) for i, sampling in enumerate(params)
        ]  # fmt: skip

    alone = sampled()
    for request in alone:
        run(runner, [request])
    batched, preempted, overlapped = sampled(), sampled(), sampled()
    run(runner, batched)
    run(runner, overlapped, depth=2, num_blocks=24, per_request=7)
    scheduler = run(runner, preempted, num_blocks=14, per_request=7)
    assert scheduler.preemptions_total > 0
    assert outputs(batched) == outputs(alone)
    assert outputs(preempted) == outputs(alone)
    assert outputs(overlapped) == outputs(alone)
    swapped = sampled()
    scheduler = run(runner, swapped, num_blocks=14, per_request=7, swap=True)
    assert scheduler.suspension.host.swaps_total > 0
    assert scheduler.recomputed_tokens_total == 0
    assert outputs(swapped) == outputs(alone)
    first, second = sampled(), sampled()
    for index, request in enumerate(second):
        request.id += " again"
        request.arrival_us = 1 + index
    scheduler = run(runner, [*first, *second], max_sequences=1, prefix=True)
    assert scheduler.prefix.hits_total >= len(second)
    assert all(request.num_cached_tokens == 16 for request in second)
    assert outputs(first) == outputs(second) == outputs(alone)
    assert len({tuple(output) for output in outputs(alone)}) == len(alone)


def test_a_grammar_follows_what_is_sampled_whatever_is_planned_ahead_or_lost(runner: TorchRunner, tiny: Path) -> None:
    """The mask is that of the tokens so far: undisturbed, batched, overlapped, preempted and swapped."""
    tokenizer = load_tokenizer(ModelSource(path=str(tiny)))
    grammars = Grammars(lambda: 0)

    async def constraint(regex: str) -> Constraint:
        structure = Structure("regex", regex, "guided_regex")
        made = await grammars.constraints(
            structure, tokenizer, runner.vocab_size, request_id="r", count=1, until_us=None
        )
        return made[0]

    def sampled() -> list[Request]:
        regexes = ["(ab|cde|[0-9]{2},)*", "[a-f]{3}(-[a-f]{3})*", "x*", "(a|b(c|d(e|f)))*"]
        params = [
            SamplingParams(max_tokens=16, temperature=temperature, seed=seed, constrained=True)
            for seed, temperature in enumerate((2.0, 1.5, 1.0, 0.0))
        ]
        requests = [Request(str(i), _prompt(i, 20), 20, sampling, 0) for i, sampling in enumerate(params)]
        for request, regex in zip(requests, regexes, strict=True):
            request.constraint = asyncio.run(constraint(f"{regex}!{{100}}"))
        return [*requests, Request("free", _prompt(9, 20), 20, SamplingParams(max_tokens=16, seed=9), 0)]

    alone = sampled()
    for request in alone:
        run(runner, [request])
    batched, overlapped, preempted, swapped = sampled(), sampled(), sampled(), sampled()
    run(runner, batched)
    run(runner, overlapped, depth=2, num_blocks=24, per_request=7)
    assert run(runner, preempted, num_blocks=12, per_request=7).preemptions_total > 0
    assert run(runner, swapped, num_blocks=12, per_request=7, swap=True).suspension.host.swaps_total > 0

    assert outputs(batched) == outputs(overlapped) == outputs(preempted) == outputs(swapped) == outputs(alone)
    texts = [tokenizer.decode(output) for output in outputs(alone)]
    assert len(set(texts)) == 5
    assert re.fullmatch(r"(ab|cde|[0-9]{2},)*(a|c|cd|[0-9]{1,2})?!*", texts[0])
    assert re.fullmatch(r"[a-f]{3}(-[a-f]{3})*(-[a-f]{0,3})?!*", texts[1])
    grammars.close()


def test_a_log_probability_is_the_model_s_own(runner: TorchRunner, reference: Reference) -> None:
    prompt = _prompt(7, 30)
    sampling = SamplingParams(max_tokens=1, temperature=2.0, top_k=3, repetition_penalty=1.5, logprobs=True, seed=4)
    request = Request("r", prompt, 30, sampling, 0)
    request.blocks = list(range(4))
    entry = ScheduledRequest(request, 0, 0, 0, 30, samples=True)
    result = runner.execute(plan_of(1, entry))
    expected = reference.logits(prompt)[-1].log_softmax(-1)[result.token_ids[0]]
    assert result.logprobs[0].value == pytest.approx(float(expected), abs=1e-4)


def test_a_measured_step_touches_no_live_block(runner: TorchRunner, reference: Reference) -> None:
    prompt = _prompt(11, 50)
    request = greedy("live", prompt, max_tokens=8)
    request.blocks = list(range(blocks_for(58, runner.block_tokens)))
    start = 0
    for step in range(8):
        entry = ScheduledRequest(request, 0, 0, start, len(request.tokens) - start, samples=True)
        start = len(request.tokens)
        request.tokens.append(int(runner.execute(plan_of(step, entry)).token_ids[0]))
        for cell in ((1, 0, 0), (5, 16, 100), (0, 64, 64), (3, 0, 10**9), (0, 5000, 0)):
            assert runner.measure(*cell) > 0
    reference.assert_greedy(prompt, request.tokens[50:])


def test_a_slot_that_changes_hands_forgets_its_last_owner(runner: TorchRunner, reference: Reference) -> None:
    namesakes = [greedy("same id", _prompt(1, 40)), greedy("same id", _prompt(2, 40))]
    for request, blocks in zip(namesakes, ([3, 1, 4, 0, 5], [9, 2, 6, 8, 7]), strict=True):
        request.blocks = blocks
        entry = ScheduledRequest(request, 0, 0, 0, 40, samples=True)
        request.tokens.append(int(runner.execute(plan_of(1, entry)).token_ids[0]))
    for request in namesakes:
        reference.assert_greedy(request.tokens[:40], request.tokens[40:])


def test_logits_that_are_not_finite_fail_their_request_alone(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", tied_head=False)
    runner = load_runner(ModelSource(path=str(path)), capacity_bytes=1 << 20)
    with torch.inference_mode():
        runner._model._embedding[7] = float("nan")
    good, bad = greedy("good", [1, 2, 3], 4), greedy("bad", [5, 7, 9], 4)
    for slot, request in enumerate((good, bad)):
        request.blocks = [slot]
    entries = tuple(ScheduledRequest(r, 0, slot, 0, 3, samples=True) for slot, r in enumerate((good, bad)))
    errors = runner.execute(plan_of(1, *entries)).errors
    assert errors == {1: "the model's logits are not finite"}


def test_loading_tells_how_far_it_is(tiny: Path) -> None:
    seen: list[LoadingProgress] = []
    config = EngineConfig(
        model=ModelConfig(source=ModelSource(path=str(tiny)), served_name="t"),
        cache=CacheConfig(capacity_bytes=1 << 20),
    )
    assemble_runner(config, seen.append)
    done = [progress.bytes_done for progress in seen if progress.stage == "weights"]
    assert done == sorted(done)
    assert (
        done[-1] == seen[0].bytes_total == sum(p.stat().st_size for p in tiny.glob("*.safetensors")) - _overhead(tiny)
    )


def test_a_model_in_the_making_holds_one_layer_unpacked_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_engine.compute.model.KEEP_ROWS_UP_TO_BYTES", 0)
    path = make_tiny_llama(tmp_path / "model", num_layers=5)
    weights = load(open_tensors(path), torch.float32, torch.device("cpu"), lambda _: None)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(layers: Iterator[LayerWeights]) -> Iterator[LayerWeights]:
        for layer in layers:
            held.extend(weakref.ref(matrix) for matrix in (layer.qkv, layer.attention_out, layer.gate_up, layer.down))
            alive.append(sum(matrix() is not None for matrix in held))
            yield layer

    Model(replace(weights, layers=watched(weights.layers)), 64, None)
    # This layer's four matrices, and those of the one before until its place is taken.
    assert len(alive) == 5
    assert max(alive) <= 8


def test_the_first_token_is_the_model_s_own(runner: TorchRunner, reference: Reference) -> None:
    prompt = _prompt(5, 21)
    assert runner.first_token(prompt) == int(reference.logits(prompt)[-1].argmax())


def test_weights_that_give_no_number_end_the_start(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path / "model.safetensors")
    runner = load_runner(ModelSource(path=str(path)), capacity_bytes=1 << 20)
    with pytest.raises(
        ModelUnavailable, match=r"the first token fails: .* not finite; the weights are damaged"
    ) as caught:
        runner.first_token([1, 2, 3])
    assert caught.value.code == "ModelCorrupt"


def test_weights_that_memory_cannot_hold_are_refused_before_they_are_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_engine.compute.loading.free_memory_bytes", lambda _device: 100_000)
    read: list[str] = []
    monkeypatch.setattr(
        "sluice_engine.model_files.weights_safetensors.SafetensorsTensors.read", lambda _self, name: read.append(name)
    )
    says = r"its weights are 0\.\d MB in float32, and 0\.1 MB of memory are free"
    with pytest.raises(ModelUnavailable, match=says) as caught:
        load_runner(ModelSource(path=str(tiny)))
    assert caught.value.code == "OutOfMemory"
    assert read == []


def _overhead(path: Path) -> int:
    return 8 + int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")


def test_the_pool_is_as_large_as_the_capacity_allows(tiny: Path) -> None:
    block_bytes = 2 * 2 * 4 * 8 * 4 * 16  # k and v, layers, KV heads, dimensions, bytes, tokens
    runner = load_runner(ModelSource(path=str(tiny)), capacity_bytes=10 * block_bytes + 5)
    assert (runner.num_blocks, runner.block_tokens, runner.vocab_size) == (9, 16, VOCAB_SIZE)
    with pytest.raises(InvalidConfig, match=rf"cache.capacity_bytes: is 100; .*at least {2 * block_bytes}"):
        load_runner(ModelSource(path=str(tiny)), capacity_bytes=100)
    with pytest.raises(InvalidConfig, match=r"cache.capacity_bytes: .* bytes are free beside the weights"):
        load_runner(ModelSource(path=str(tiny)), capacity_bytes=1 << 50)


def test_a_length_beyond_the_model_s_own_is_refused(tiny: Path) -> None:
    model = ModelConfig(source=ModelSource(path=str(tiny)), served_name="t", max_length_tokens=1025)
    with pytest.raises(InvalidConfig, match=r"model.max_length_tokens: is 1025; the model's own length is 1024"):
        assemble_runner(EngineConfig(model=model), lambda _: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(tiny: Path) -> None:
    model = ModelConfig(source=ModelSource(path=str(tiny)), served_name="t")
    with pytest.raises(InvalidConfig, match="accelerator_count: is 1, but torch sees no GPU"):
        assemble_runner(EngineConfig(model=model, accelerator_count=1), lambda _: None)


def test_fewer_gpus_than_ranks_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = ModelConfig(source=ModelSource(path=str(tiny)), served_name="t")
    with pytest.raises(InvalidConfig, match="accelerator_count: is 2, and this machine has 1 that torch sees"):
        assemble_runner(EngineConfig(model=model, accelerator_count=2, tensor_parallel=2), lambda _: None)


def test_bfloat16_that_is_asked_for_is_honoured(tiny: Path) -> None:
    model = ModelConfig(source=ModelSource(path=str(tiny)), served_name="t", data_type="BFloat16")
    runner = assemble_runner(
        EngineConfig(model=model, cache=CacheConfig(capacity_bytes=1 << 20)), lambda _: None
    )  # fmt: skip
    assert runner._cache.dtype is torch.bfloat16
    request = greedy("r", _prompt(1, 20), 8)
    run(runner, [request])
    assert request.num_output == 8


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        load_runner(ModelSource(path=str(tmp_path / "absent")))
    assert caught.value.code == "ModelMissing"


def test_state_that_was_swapped_out_and_in_gives_the_tokens_of_an_undisturbed_run(
    tiny: Path, reference: Reference
) -> None:
    runner = load_runner(ModelSource(path=str(tiny)), capacity_bytes=1 << 20, block_tokens=8, host_swap_bytes=1 << 18)
    prompt = _prompt(21, 30)
    request = greedy("r", prompt, max_tokens=12)
    request.blocks = [0, 1, 2, 3, 4, 5]

    def step(number: int, start: int, swap_in: Copies = ()) -> None:
        entry = ScheduledRequest(request, request.incarnation, 0, start, request.num_tokens - start, samples=True)
        plan = replace(plan_of(number, entry), swap_in=swap_in)
        request.tokens.append(int(runner.execute(plan).token_ids[0]))

    step(1, 0)
    for number in range(2, 7):
        step(number, request.num_tokens - 1)
    held, request.blocks = request.blocks, [9, 8, 7, 12, 11, 10]
    runner.execute(StepPlan(7, swap_out=tuple(zip(held[:5], (3, 1, 2, 5, 4), strict=True))))
    with torch.inference_mode():
        for layer in range(2):
            runner._cache.layer(layer)[: 6 * 8] = float("nan")  # others have the blocks now
    request.incarnation += 1
    step(8, request.num_tokens - 1, swap_in=tuple(zip(request.blocks[:5], (3, 1, 2, 5, 4), strict=True)))
    for number in range(9, 14):
        step(number, request.num_tokens - 1)

    reference.assert_greedy(prompt, request.tokens[30:])


def test_host_memory_that_is_not_there_or_holds_no_block_is_refused(tiny: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"cache.host_swap_bytes: is 100; one block of this model is \d+"):
        load_runner(ModelSource(path=str(tiny)), capacity_bytes=1 << 20, host_swap_bytes=100)
    with pytest.raises(InvalidConfig, match=r"cache.host_swap_bytes: .* bytes of host memory are free"):
        load_runner(ModelSource(path=str(tiny)), capacity_bytes=1 << 20, host_swap_bytes=1 << 50)
