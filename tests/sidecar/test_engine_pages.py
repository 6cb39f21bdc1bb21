"""What each engine's page says, read from real pages and from ones that lack, double or spoil something."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.foreign_server import page, vllm_page
from sluice_sidecar.engines.dialect import Dialect
from sluice_sidecar.engines.llamacpp import LlamaCpp
from sluice_sidecar.engines.page import Page, UnreadablePage
from sluice_sidecar.engines.reading import Reading
from sluice_sidecar.engines.sglang import SGLang
from sluice_sidecar.engines.vllm import VLLM
from sluice_sidecar.errors import EngineUnreachable


def read(dialect: Dialect, text: bytes | str) -> Reading:
    data = text.encode() if isinstance(text, str) else text
    return dialect.read(Page(data, dialect.traits.families))


def test_a_real_page_of_vllm() -> None:
    reading = read(VLLM(), page("vllm-0.32.0"))

    assert reading == Reading(
        running=0, waiting=0, kv_tokens=93184, kv_used_tokens=0, block_tokens=128, preemptions_total=0,
        gap_seconds_total=996.239088131992, gaps_total=10029, prompt_tokens_total=24422,
        output_tokens_total=10192, started_s=1.79598294317e09, asleep=False,
    )  # fmt: skip


def test_a_real_page_of_llama_cpp() -> None:
    reading = read(LlamaCpp(), page("llama-cpp-b11434"))

    assert reading == Reading(
        running=0, waiting=0, kv_used_tokens=None, block_tokens=1, gap_seconds_total=99.767,
        gaps_total=1548, prompt_tokens_total=2943, steps_total=268,
    )  # fmt: skip


def test_a_page_of_sglangs_own_collectors() -> None:
    """Printed by the collectors of 0.5.23 with priorities on; no server ran: its kernels come for CUDA only."""
    reading = read(SGLang(), page("sglang-0.5.23"))

    assert reading == Reading(
        running=3, waiting=4, kv_tokens=4096, kv_used_tokens=1024, block_tokens=1, context_tokens=512,
        preemptions_total=2, gap_seconds_total=0.5, gaps_total=10, prompt_tokens_total=200, output_tokens_total=40,
        started_s=reading.started_s,
    )  # fmt: skip
    assert reading.started_s is not None, "though each priority has numbers beside those of all"


def test_old_names_of_vllm_are_read_where_new_ones_are_missing() -> None:
    reading = read(
        VLLM(),
        'vllm:num_requests_running{model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{model_name="m"} 2.0\n'
        'vllm:num_requests_swapped{model_name="m"} 1.0\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        'vllm:num_preemptions{model_name="m"} 4.0\n'
        'vllm:time_per_output_token_seconds_sum{model_name="m"} 2.5\n'
        'vllm:time_per_output_token_seconds_count{model_name="m"} 50.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n',
    )

    assert (reading.running, reading.waiting, reading.preemptions_total) == (3, 3, 4)
    assert (reading.kv_tokens, reading.kv_used_tokens, reading.block_tokens) == (1600, 800, 16)
    assert (reading.gap_seconds_total, reading.gaps_total) == (2.5, 50)


def test_usage_of_data_parallel_engines_is_weighted_by_their_size() -> None:
    reading = read(
        VLLM(),
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\nvllm:num_requests_waiting{engine="1"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 1.0\nvllm:kv_cache_usage_perc{engine="1"} 0.0\n'
        'vllm:num_preemptions_total{engine="0"} 2.0\nvllm:num_preemptions_total{engine="1"} 5.0\n'
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1.0\n'
        'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="300"} 1.0\n',
    )

    assert (reading.running, reading.waiting, reading.preemptions_total) == (7, 1, 7)
    assert (reading.kv_tokens, reading.kv_used_tokens) == (6400, 1600)


def test_an_engine_whose_size_is_not_told_has_no_usage_either() -> None:
    reading = read(VLLM(), vllm_page().replace(b'num_gpu_blocks="64"', b'num_gpu_blocks="None"'))

    assert (reading.kv_tokens, reading.kv_used_tokens) == (None, None)


@pytest.mark.parametrize(
    ("text", "asleep"),
    [
        pytest.param('vllm:engine_sleep_state{sleep_state="awake"} 1.0\n', False, id="awake"),
        pytest.param('vllm:engine_sleep_state{sleep_state="awake"} 0.0\n', True, id="asleep"),
        pytest.param("", False, id="an-engine-that-cannot-sleep"),
    ],
)
def test_a_sleeping_engine_says_so(text: str, *, asleep: bool) -> None:
    assert read(VLLM(), vllm_page() + text.encode()).asleep is asleep


SGLANG = """
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0",dp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="1",dp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="0",dp_rank="1"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="0"} 1.0
sglang:num_queue_reqs{model_name="m",tp_rank="1",dp_rank="0"} 1.0
sglang:num_queue_reqs{model_name="m",tp_rank="0",dp_rank="1"} 0.0
sglang:num_grammar_queue_reqs{model_name="m",tp_rank="0",dp_rank="0"} 2.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0",dp_rank="0"} 1000.0
sglang:max_total_num_tokens{model_name="m",tp_rank="1",dp_rank="0"} 1000.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0",dp_rank="1"} 1000.0
sglang:token_usage{model_name="m",tp_rank="0",dp_rank="0"} 0.25
sglang:token_usage{model_name="m",tp_rank="1",dp_rank="0"} 0.25
sglang:token_usage{model_name="m",tp_rank="0",dp_rank="1"} 0.75
sglang:page_size{model_name="m",tp_rank="0",dp_rank="0"} 64.0
sglang:context_len{model_name="m",tp_rank="0",dp_rank="0"} 4096.0
sglang:num_retracted_requests_total{model_name="m",tp_rank="0",dp_rank="0"} 3.0
sglang:num_retracted_requests_total{model_name="m",tp_rank="1",dp_rank="0"} 3.0
sglang:inter_token_latency_seconds_sum{model_name="m"} 4.0
sglang:inter_token_latency_seconds_count{model_name="m"} 80.0
sglang:cache_hit_rate{model_name="m"} 0.5
"""


def test_ranks_of_one_data_parallel_group_tell_the_same_and_groups_add_up() -> None:
    reading = read(SGLang(), SGLANG)

    assert (reading.running, reading.waiting, reading.preemptions_total) == (7, 3, 3)
    assert (reading.kv_tokens, reading.kv_used_tokens) == (2000, 1000)
    assert (reading.block_tokens, reading.context_tokens) == (64, 4096)
    assert (reading.gap_seconds_total, reading.gaps_total) == (4.0, 80)


def test_tokens_in_use_go_before_their_share() -> None:
    assert read(SGLang(), SGLANG + 'sglang:num_used_tokens{dp_rank="0"} 30.0\n').kv_used_tokens == 30


def test_a_series_that_is_missing_is_not_zero() -> None:
    reading = read(VLLM(), vllm_page(num_preemptions_total=None, kv_cache_usage_perc=None))

    assert (reading.preemptions_total, reading.kv_used_tokens) == (None, None)
    assert reading.running == 0


@pytest.mark.parametrize("spoilt", ["NaN", "+Inf", "-Inf"])
def test_a_value_that_is_no_number_is_as_good_as_missing_and_named(spoilt: str) -> None:
    text = vllm_page().replace(b'usage_perc{engine="0"} 0.0', f'usage_perc{{engine="0"}} {spoilt}'.encode())
    page = Page(text, VLLM.traits.families)

    assert VLLM().read(page).kv_used_tokens is None
    assert page.no_numbers == {"vllm:kv_cache_usage_perc"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'vllm:num_requests_running{engine="0"} three\n', id="a-word"),
        pytest.param(b'vllm:num_requests_running{engine="0} 3\n', id="an-open-label"),
        pytest.param(b'vllm:num_requests_running{engine="0"}\n', id="no-value"),
        pytest.param(b'vllm:num_requests_running{engine="\xff"} 3\n', id="no-utf-8"),
    ],
)
def test_a_line_that_cannot_be_read_spoils_the_page(text: bytes) -> None:
    with pytest.raises(UnreadablePage):
        Page(text, VLLM.traits.families)


def test_what_is_not_wanted_is_not_even_parsed() -> None:
    page = Page(b'garbage{ 1\nvllm:num_requests_running{engine="0"} 3\n', VLLM.traits.families)

    assert VLLM().read(page).running == 3


@pytest.mark.parametrize("text", [b"", b"<html>not found</html>", b"\x00\x01"])
def test_a_page_of_something_else_tells_nothing(text: bytes) -> None:
    reading = read(VLLM(), text)

    assert (reading.running, reading.waiting, reading.kv_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        pytest.param({"prompt_tokens_total": 10}, {"prompt_tokens_total": 12}, False, id="it-grew"),
        pytest.param({"prompt_tokens_total": 10}, {"prompt_tokens_total": 9}, True, id="it-fell"),
        pytest.param({"prompt_tokens_total": 10}, {"prompt_tokens_total": None}, False, id="it-went-missing"),
        pytest.param({"started_s": 1.0}, {"started_s": 2.0}, True, id="another-process"),
        pytest.param({"started_s": 1.0}, {"started_s": None}, False, id="its-start-went-missing"),
    ],
)
def test_a_counter_that_fell_is_another_process(
    before: dict[str, Any], after: dict[str, Any], *, restarted: bool
) -> None:
    first, second = (Reading(running=0, waiting=0, **values) for values in (before, after))

    assert second.restarted_since(first) is restarted


async def _answers(documents: dict[str, Any]) -> Any:
    async def get_json(path: str) -> Any:
        if path not in documents:
            raise EngineUnreachable(path, refused=False)
        return documents[path]

    return get_json


MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}


async def test_facts_of_vllm() -> None:
    facts = await VLLM().facts(await _answers({"/v1/models": MODELS}))

    assert (facts.model, facts.context_tokens, facts.max_sequences) == ("m", 4096, None)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_facts_of_sglang_by_either_path(path: str) -> None:
    info = {
        "max_total_num_tokens": 9000, "chunked_prefill_size": 8192, "page_size": 1, "max_running_requests": None,
        "internal_states": [{"effective_max_running_requests_per_dp": 40}],
    }  # fmt: skip
    facts = await SGLang().facts(await _answers({"/v1/models": MODELS, path: info}))

    assert (facts.kv_tokens, facts.chunk_tokens, facts.max_sequences, facts.block_tokens) == (9000, 8192, 40, 1)


async def test_facts_of_llama_cpp() -> None:
    props = {"total_slots": 16, "default_generation_settings": {"n_ctx": 2048}}
    facts = await LlamaCpp().facts(await _answers({"/v1/models": {"data": [{"id": "m"}]}, "/props": props}))

    assert (facts.context_tokens, facts.kv_tokens, facts.max_sequences) == (2048, 2048, 16)


@pytest.mark.parametrize("nonsense", [None, [], "x", {"data": []}, {"data": ["x"]}, {"data": {}}])
async def test_facts_that_are_nonsense_are_no_facts(nonsense: Any) -> None:
    assert (await VLLM().facts(await _answers({"/v1/models": nonsense}))).context_tokens is None


@pytest.mark.parametrize(
    ("dialect", "question", "answers", "count"),
    [
        pytest.param(VLLM(), {"messages": []}, {"/tokenize": {"count": 7}}, 7, id="vllm"),
        pytest.param(VLLM(), {"prompt": "a"}, {"/tokenize": None}, None, id="vllm-that-does-not-answer"),
        pytest.param(SGLang(), {"prompt": "a"}, {"/tokenize": {"count": 7}}, 7, id="sglang"),
        pytest.param(SGLang(), {"messages": []}, {}, None, id="sglang-takes-no-messages"),
        pytest.param(LlamaCpp(), {"prompt": "a"}, {"/tokenize": {"tokens": [1, 2]}}, 2, id="llama.cpp"),
        pytest.param(
            LlamaCpp(),
            {"messages": []},
            {"/apply-template": {"prompt": "x"}, "/tokenize": {"tokens": [1, 2, 3]}},
            3,
            id="llama.cpp-puts-messages-into-the-template-first",
        ),
    ],
)
async def test_prompts_are_counted_as_each_engine_counts(
    dialect: Dialect, question: dict[str, Any], answers: dict[str, Any], count: int | None
) -> None:
    async def post_json(path: str, body: dict[str, Any]) -> Any:
        return answers[path]

    assert await dialect.count_tokens(question, post_json) == count
