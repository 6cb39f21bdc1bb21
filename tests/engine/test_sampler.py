from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.scripted import SampledToken
from sluice_engine.compute.draw import exponentials, keys_of
from sluice_engine.compute.sampler import Sampler, Samples
from sluice_engine.core.plan import ScheduledRequest
from sluice_engine.core.request import Request, SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
PROBABILITIES = LOGITS.softmax(-1).tolist()


def _entry(
    sampling: SamplingParams, *, position: int = 10, slot: int = 0, output: tuple[int, ...] = ()
) -> ScheduledRequest:
    tokens = [0] * (position - len(output)) + list(output)
    request = Request(f"r{slot}", tokens, position - len(output), sampling, 0)
    return ScheduledRequest(request, 0, slot, position - 1, 1, samples=True)


def _sample(logits: Tensor, *entries: ScheduledRequest) -> tuple[SampledToken, ...]:
    return _tokens(Sampler().sample(logits.expand(len(entries), -1).clone(), entries))


def _tokens(samples: Samples) -> tuple[SampledToken, ...]:
    return tuple(
        SampledToken(token_id, samples.logprobs.get(row), samples.errors.get(row))
        for row, token_id in enumerate(samples.token_ids)
    )


def _draws(count: int, logits: Tensor = LOGITS, **params: float) -> Counter[int]:
    entries = [
        _entry(SamplingParams(max_tokens=1, seed=9, **params), position=position, slot=position)  # type: ignore[arg-type]
        for position in range(1, count + 1)
    ]
    return Counter(token.token_id for token in _sample(logits, *entries))


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    draws = _draws(4000)
    for token, probability in enumerate(PROBABILITIES):
        spread = math.sqrt(4000 * probability * (1 - probability))
        assert abs(draws[token] - 4000 * probability) < 5 * spread


def test_tokens_of_all_groups_are_drawn_as_often_as_they_should() -> None:
    logits = torch.linspace(0, 3, 1_000)  # four groups, the last not full
    draws = _draws(8000, logits)
    probabilities = logits.softmax(-1)
    for first, last in ((0, 100), (100, 256), (256, 512), (700, 900), (990, 1_000)):
        share = probabilities[first:last].sum().item()
        found = sum(draws[token] for token in range(first, last))
        assert abs(found - 8000 * share) < 5 * math.sqrt(8000 * share * (1 - share)), (first, last)


def test_temperature_flattens_or_sharpens() -> None:
    cold, hot = _draws(1000, temperature=0.3), _draws(1000, temperature=3.0)
    assert cold[0] > 0.95 * 1000
    expected = (LOGITS / 3).softmax(-1)[0].item() * 1000
    assert abs(hot[0] - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        pytest.param({"top_k": 2}, {0, 1}, id="top_k keeps the two likeliest"),
        pytest.param({"top_k": 9}, {0, 1, 2, 3, 4}, id="a top_k beyond the vocabulary keeps all"),
        pytest.param({"top_p": 0.5}, {0}, id="top_p keeps the first token that reaches the share"),
        pytest.param({"top_p": 0.7}, {0, 1}, id="top_p keeps the token that crosses the share"),
        pytest.param({"top_p": 1e-9}, {0}, id="a tiny top_p keeps one"),
        pytest.param({"min_p": 0.2}, {0, 1}, id="min_p is relative to the likeliest"),
        pytest.param({"min_p": 1.0}, {0}, id="min_p of one keeps the likeliest"),
        pytest.param({"top_k": 2, "top_p": 0.73}, {0}, id="top_p shares out what top_k left"),
        pytest.param({"temperature": 1e-4}, {0}, id="a temperature near zero does not overflow"),
        pytest.param({"temperature": 0.0}, {0}, id="temperature zero is greedy"),
    ],
)
def test_filters_keep_what_they_should(params: dict[str, float], possible: set[int]) -> None:
    assert set(_draws(3000, LOGITS, **params)) == possible


def test_top_p_is_exact_where_the_nucleus_is_larger_than_the_sorted_prefix() -> None:
    logits = torch.linspace(0, 0.5, 3000)
    order = logits.softmax(-1).sort(descending=True)
    kept = int(((order.values.double().cumsum(-1) - order.values) < 0.6).sum())
    draws = _draws(2000, logits, top_p=0.6)
    assert min(draws) >= 3000 - kept - 1
    assert min(draws) < 3000 - kept + 20


def test_tokens_of_equal_logits_are_kept_or_dropped_together() -> None:
    assert set(_draws(500, torch.tensor([1.0, 1.0, 0.0]), top_k=1)) == {0, 1}


@given(seed=st.integers(-(2**63), 2**63), choice=st.integers(0, 20), position=st.integers(0, 10**6))
def test_each_token_of_each_draw_has_a_number_of_its_own(seed: int, choice: int, position: int) -> None:
    racers = torch.arange(500, dtype=torch.int32)
    mine = keys_of(seed, choice, position)
    assert mine == keys_of(seed, choice, position)
    assert len({mine, keys_of(seed + 1, choice, position), keys_of(seed, choice + 1, position)}) == 3
    row = exponentials([mine, keys_of(seed, choice, position + 1)], racers)
    assert torch.equal(row[:1], exponentials([mine], racers)), "whoever else draws"
    assert bool(((row > 0) & row.isfinite()).all())
    assert len(set(row.flatten().tolist())) > 990


def test_the_numbers_are_distributed_as_a_race_needs_them() -> None:
    keys = [keys_of(7, 0, position) for position in range(200)]
    values = exponentials(keys, torch.arange(-192, 4_808, dtype=torch.int32)).double()
    assert values.mean().item() == pytest.approx(1, abs=0.005)
    assert values.var().item() == pytest.approx(1, abs=0.01)
    assert (values < 1e-4).double().mean().item() == pytest.approx(1e-4, rel=0.3), "the small ones win"
    centred = values - 1
    for other in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs((centred * other).mean().item()) < 0.005, "neighbours know nothing of each other"


def test_rounding_in_a_batch_hardly_ever_changes_a_draw() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(400, 5_000, generator=generator) * 2
    entries = [_entry(SamplingParams(max_tokens=1, seed=5), position=i + 1, slot=i) for i in range(400)]
    noisy = logits + (torch.rand(logits.shape, generator=generator) - 0.5) * 4e-5
    drawn, again = (Sampler().sample(x.clone(), entries).token_ids for x in (logits, noisy))
    assert drawn == again


def test_a_row_s_token_does_not_depend_on_its_neighbours() -> None:
    mixed = [
        _entry(SamplingParams(max_tokens=1, temperature=1.1, seed=3), slot=0),
        _entry(SamplingParams(max_tokens=1, temperature=0.0), slot=1),
        _entry(SamplingParams(max_tokens=1, temperature=0.9, top_p=0.9, top_k=3, seed=4), slot=2),
        _entry(SamplingParams(max_tokens=1, temperature=0.9, frequency_penalty=1.0, seed=4), slot=3, output=(0, 0)),
        _entry(SamplingParams(max_tokens=1, temperature=2.0, min_p=0.1, seed=5), slot=4),
    ]
    together = _sample(LOGITS, *mixed)
    assert list(together) == [_sample(LOGITS, entry)[0] for entry in mixed]


def test_frequency_and_presence_penalties_count_output_tokens_only() -> None:
    def chosen(**params: float) -> int:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, **params)  # type: ignore[arg-type]
        return _sample(LOGITS, _entry(sampling, output=(1, 0, 0)))[0].token_id

    assert chosen(frequency_penalty=0.6) == 0  # 2 − 1.2, 1 − 0.6, 0
    assert chosen(frequency_penalty=0.7) == 0
    assert chosen(frequency_penalty=1.1) == 2  # 2 − 2.2, 1 − 1.1, 0
    assert chosen(presence_penalty=1.9) == 0  # 2 − 1.9, 1 − 1.9, 0
    assert chosen(presence_penalty=2.1) == 2
    only_prompt = _entry(SamplingParams(max_tokens=1, temperature=0.0, presence_penalty=2.0), position=5)
    assert _sample(LOGITS, only_prompt)[0].token_id == 0


def test_the_repetition_penalty_counts_the_prompt_and_turns_with_the_sign() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    seen = _entry(SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=1.5), position=4)  # prompt of 0s
    assert _sample(logits, seen)[0].token_id == 1
    negative = torch.tensor([-1.0, -1.1, -3.0])
    assert _sample(negative, seen)[0].token_id == 1


def test_penalties_follow_a_request_as_it_grows_and_leave_its_slot_with_it() -> None:
    sampler = Sampler()
    sampling = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=3.0)
    request = Request("a", [4], 1, sampling, 0)
    for expected in (0, 1, 2):
        entry = ScheduledRequest(request, 0, 0, len(request.tokens) - 1, 1, samples=True)
        (token,) = _tokens(sampler.sample(LOGITS[None].clone(), [entry]))
        assert token.token_id == expected
        request.tokens.append(token.token_id)
    heir = ScheduledRequest(Request("b", [4], 1, sampling, 0), 0, 0, 0, 1, samples=True)
    assert sampler.sample(LOGITS[None].clone(), [heir]).token_ids[0] == 0


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.7, "top_k": 2}, {"presence_penalty": 1.5}])
def test_the_log_probability_is_of_the_raw_logits(params: dict[str, float]) -> None:
    sampling = SamplingParams(max_tokens=1, logprobs=True, **params)  # type: ignore[arg-type]
    (token,) = _sample(LOGITS, _entry(sampling, output=(0,)))
    assert token.logprob is not None
    assert token.logprob.value == pytest.approx(math.log(PROBABILITIES[token.token_id]), abs=1e-5)
    silent = _entry(SamplingParams(max_tokens=1), slot=1)
    assert [t.logprob is None for t in _sample(LOGITS, _entry(sampling), silent)] == [False, True]


def test_each_row_has_as_many_likeliest_tokens_as_it_asked_for() -> None:
    wanted = [SamplingParams(max_tokens=1, logprobs=True, top_logprobs=count) for count in (0, 2, 9)]
    rows = _sample(LOGITS, *(_entry(sampling, slot=slot) for slot, sampling in enumerate(wanted)))

    tops = [row.logprob.top for row in rows if row.logprob is not None]
    assert [[token for token, _ in top] for top in tops] == [[], [0, 1], [0, 1, 2, 3, 4]], "and no more than there are"
    for token, value in tops[2]:
        assert value == pytest.approx(math.log(PROBABILITIES[token]), abs=1e-5)


def test_a_bias_moves_its_tokens_and_no_log_probability() -> None:
    banned = SamplingParams(max_tokens=1, temperature=0.0, logit_bias=((0, -100.0), (2, 1.5)), logprobs=True)
    alone, beside = _sample(LOGITS, _entry(banned), _entry(SamplingParams(max_tokens=1, temperature=0.0), slot=1))

    assert (alone.token_id, beside.token_id) == (2, 0)
    assert alone.logprob is not None
    assert alone.logprob.value == pytest.approx(math.log(PROBABILITIES[2]), abs=1e-5)
    assert not banned.plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_ends_a_request_cannot_come_before_its_least_tokens(temperature: float) -> None:
    sampling = SamplingParams(
        max_tokens=9, temperature=temperature, top_k=1, min_tokens=2, stop_token_ids=frozenset({0, 1})
    )
    tokens = [_sample(LOGITS, _entry(sampling, output=(3,) * produced))[0].token_id for produced in range(4)]

    assert tokens == [2, 2, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    entries = [_entry(SamplingParams(max_tokens=1, temperature=temperature, logprobs=True), slot=i) for i in range(3)]
    logits = LOGITS.expand(3, -1).clone()
    logits[1, 3] = bad
    first, middle, last = _tokens(Sampler().sample(logits, entries))
    assert middle.error == "the model's logits are not finite"
    assert (first.error, last.error) == (None, None)
    assert first.token_id == _sample(LOGITS, entries[0])[0].token_id


@pytest.mark.parametrize("logprobs", [True, False], ids=["with-log-probabilities", "without"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_a_row_that_a_penalty_breaks_fails_alone_and_lets_no_false_token_out(
    temperature: float, *, logprobs: bool
) -> None:
    """A penalty this small is refused at the door; the sampler does not rely on that."""
    broken = SamplingParams(max_tokens=1, repetition_penalty=1e-40, temperature=temperature, logprobs=logprobs)
    entries = [_entry(broken, slot=0), _entry(SamplingParams(max_tokens=1, logprobs=logprobs), slot=1)]

    first, second = _tokens(Sampler().sample(LOGITS.expand(2, -1).clone(), entries))

    assert first.error is not None
    assert second.error is None
    assert 0 <= second.token_id < len(LOGITS)
