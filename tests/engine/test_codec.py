"""Configuration in and out of JSON: what is wrong is named, nothing is dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.codec import decode, digest, from_json, to_json
from sluice_engine.config import CacheConfig, EngineConfig, ModelConfig, ModelSource, SchedulerConfig
from sluice_engine.core.state import EngineState, is_readable
from sluice_engine.errors import InvalidConfig
from sluice_engine.live_config import AdmissionConfig, LiveConfig, LiveSchedulingConfig, SLOConfig

ENGINE = EngineConfig(model=ModelConfig(source=ModelSource(demo="smollm2-135m"), served_name="smol"))
ENGINE_JSON: dict[str, Any] = json.loads(to_json(ENGINE))
LIVE = LiveConfig(slo=SLOConfig(time_to_first_token_us=2_000_000, inter_token_latency_us=150_000))


def changed(path: str, value: object) -> str:
    document = json.loads(json.dumps(ENGINE_JSON))
    *parents, last = path.split(".")
    node = document
    for parent in parents:
        node = node[parent]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param("cach", {}, "engine.json.cach: is not a known field", id="unknown-key"),
        pytest.param("model.colour", 1, "engine.json.model.colour: is not a known field", id="unknown-nested-key"),
        pytest.param("model", ..., "engine.json.model: is missing", id="missing-key"),
        pytest.param("model.served_name", 3, "model.served_name: must be of type str, not int", id="wrong-type"),
        pytest.param("cache.block_tokens", True, "cache.block_tokens: must be of type int, not bool", id="bool-as-int"),
        pytest.param("cache.block_tokens", 16.0, "must be of type int, not float", id="float-as-int"),
        pytest.param("cache.block_tokens", 17, "must be 8, 16, 32, 64 or 128, not 17", id="value-out-of-range"),
        pytest.param("model.data_type", "fp8", "must be one of Auto, Float32, BFloat16, Float16, not 'fp8'", id="word"),
        pytest.param("model.source", {}, "name exactly one of demo, path, hub", id="no-source"),
        pytest.param(
            "model.source", {"demo": "a", "path": "b"}, "name exactly one of demo, path, hub", id="two-sources"
        ),
        pytest.param(
            "model.source", {"hub": {"repository": "a/b", "file": "x.bin"}}, "must be a GGUF file", id="no-gguf-file"
        ),
        pytest.param(
            "model.source", {"demo": "a", "claim": "c"}, "model.source.claim: belongs to path", id="claim-alone"
        ),
        pytest.param("model.source", None, "engine.json.model.source: must be an object, not null", id="null"),
        pytest.param("accelerator_count", 9, "accelerator_count: must be 0 (CPU) to 8, not 9", id="nine-accelerators"),
        pytest.param("scheduling.token_budget", 2**63, "does not fit in 64 bits", id="more-than-64-bits"),
        pytest.param("scheduling.token_budget", -(10**400), "does not fit in 64 bits", id="400-digits"),
        pytest.param("scheduling.token_budget", 0, "scheduling.token_budget: must be at least 1", id="zero-budget"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        from_json(EngineConfig, changed(path, value), "engine.json")

    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        pytest.param({"pool": {"block_tokens": "x"}}, "state.pool.total_blocks: is missing", id="missing-before-wrong"),
        pytest.param({"requests": [{}, 3]}, "state.requests[0].id: is missing", id="in-a-list"),
        pytest.param({"decode_curve_us": [[1, 2], [3]]}, "state.decode_curve_us[1]: must have 2 items", id="a-pair"),
        pytest.param({"decode_curve_us": [[1, True]]}, "state.decode_curve_us[0][1]: must be of type int", id="deep"),
        pytest.param({"decode_curve_us": {}}, "state.decode_curve_us: must be a list, not dict", id="not-a-list"),
    ],
)
def test_the_whole_way_to_what_is_wrong_is_told(document: dict[str, Any], message: str) -> None:
    least = {"schema_version": "1.0", "boot_id": "b", "seq": 1, "phase": "ready", "model": "m", "max_length_tokens": 9}

    with pytest.raises(InvalidConfig) as raised:
        decode(EngineState, least | document, "state", ignore_unknown=True)

    assert message in str(raised.value)


def test_the_largest_number_of_64_bits_is_read() -> None:
    live = json.dumps({"slo": {"time_to_first_token_us": 2**63 - 1, "inter_token_latency_us": 1}})

    assert from_json(LiveConfig, live, "live.json").slo.time_to_first_token_us == 2**63 - 1


def test_a_whole_number_beyond_all_floats_is_no_float() -> None:
    document = {"slo": {"time_to_first_token_us": 1, "inter_token_latency_us": 1, "target_percent": 10**400}}

    with pytest.raises(InvalidConfig, match=r"live\.json\.slo\.target_percent: is out of the range of numbers"):
        decode(LiveConfig, document, "live.json")


def test_text_that_is_not_json_is_one_line() -> None:
    with pytest.raises(InvalidConfig) as raised:
        from_json(EngineConfig, b"\xff{", "engine.json")

    assert str(raised.value).startswith("engine.json: is not JSON")
    assert "\n" not in str(raised.value)
    with pytest.raises(InvalidConfig, match=r"^engine\.json: is not JSON"):
        from_json(EngineConfig, "[" * 100_000, "engine.json")


@given(
    st.builds(
        LiveConfig,
        slo=st.builds(
            SLOConfig,
            time_to_first_token_us=st.integers(1, 10**9),
            inter_token_latency_us=st.integers(1, 10**9),
            reference_prompt_tokens=st.integers(1, 10**6),
            target_percent=st.floats(50, 99.9),
            enforcement=st.sampled_from(["Enforce", "Observe"]),
        ),
        scheduling=st.builds(
            LiveSchedulingConfig,
            prefill_chunk_tokens=st.none() | st.integers(1, 10**6),
            max_prefill_tokens_per_request=st.none() | st.integers(1, 10**6),
        ),
        admission=st.builds(AdmissionConfig, max_wait_us=st.integers(0, 60_000_000)),
    )
)
def test_what_is_written_is_read(live: LiveConfig) -> None:
    assert from_json(LiveConfig, to_json(live), "live.json") == live


def test_equal_values_have_equal_digests_and_others_do_not() -> None:
    again = EngineConfig(model=ModelConfig(source=ModelSource(demo="smollm2-135m"), served_name="smol"))
    other = EngineConfig(model=ENGINE.model, cache=CacheConfig(block_tokens=32), scheduling=SchedulerConfig())

    assert digest(again) == digest(ENGINE)
    assert digest(other) != digest(ENGINE)


def test_a_reader_of_state_passes_over_what_a_newer_writer_added() -> None:
    document = {"schema_version": "1.7", "boot_id": "b", "seq": 1, "phase": "ready", "colour": "blue"}

    state = decode(EngineState, document, "/state", ignore_unknown=True)

    assert state.boot_id == "b"


@pytest.mark.parametrize(
    ("version", "readable"),
    [
        pytest.param("1.4", True, id="the-same"),
        pytest.param("1.2", True, id="two-minors-back"),
        pytest.param("1.1", False, id="three-minors-back"),
        pytest.param("1.9", True, id="a-newer-minor"),
        pytest.param("2.4", False, id="a-newer-major"),
        pytest.param("0.4", False, id="an-older-major"),
        pytest.param("one", False, id="no-version"),
    ],
)
def test_which_versions_of_state_are_readable(version: str, readable: bool) -> None:  # noqa: FBT001
    assert is_readable(version, "1.4") is readable


@pytest.mark.parametrize(
    ("prompt", "promise_us"),
    [
        pytest.param(1, 2_000_000, id="short"),
        pytest.param(4096, 2_000_000, id="at-the-reference"),
        pytest.param(8192, 4_000_000, id="twice-the-reference"),
        pytest.param(4097, 2_000_488, id="one-token-beyond"),
    ],
)
def test_the_ttft_promise_grows_in_proportion_beyond_the_reference(prompt: int, promise_us: int) -> None:
    assert LIVE.slo.ttft_promise_us(prompt) == promise_us
