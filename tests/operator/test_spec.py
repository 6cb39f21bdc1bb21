"""From a resource's body to typed values; durations and sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import operator_scene as scene
from sluice_engine.config import AdaptersConfig, AdapterSource, ModelSource
from sluice_operator.errors import InvalidSpec
from sluice_operator.resource import manifest, schema
from sluice_operator.resource.parsing import parse
from sluice_operator.resource.units import format_duration, parse_duration_us, parse_quantity_bytes


def test_a_minimal_spec_has_the_crds_defaults() -> None:
    spec = scene.spec()

    assert spec.model.served_name == "chat"
    assert spec.model.source == ModelSource(path="/models/llama")
    assert spec.live.slo.time_to_first_token_us == 2_000_000
    assert spec.live.slo.inter_token_latency_us == 150_000
    assert spec.live.slo.reference_prompt_tokens == 4096
    assert spec.live.slo.target_percent == 99.0
    assert spec.live.admission.max_wait_us == 1_000_000
    assert spec.drain_timeout_us == 120_000_000
    assert (spec.replicas, spec.accelerator_count, spec.accelerator_resource) == (1, 1, "nvidia.com/gpu")
    assert spec.live.scheduling.prefill_chunk_tokens is None
    assert (spec.scheduling.policy, spec.scheduling.fairness_unit) == ("FirstComeFirstServed", None)
    assert (spec.scheduling.victim, spec.scheduling.max_preemptions_per_request) == ("LeastComputed", 3)
    assert spec.live.scheduling.aging_interval_us == 20_000_000
    assert (spec.live.admission.tenants, spec.trusted_peers) == ((), ())
    assert (spec.cache.prefix_caching, spec.cache.host_swap_bytes) == ("Enabled", None)


def test_the_full_example_is_carried_over_whole() -> None:
    spec = scene.example("full")

    assert spec.model.served_name == "llama-3.2-1b-instruct"
    assert spec.adapters == AdaptersConfig(
        preloaded=(
            AdapterSource(name="sql", path="/models/adapters/sql"),
            AdapterSource(name="legal", path="/models/adapters/legal"),
        ),
        directory="/models/adapters",
        max_loaded=32,
        max_running=8,
    )
    assert spec.cache.capacity_bytes == 40 * 1024**3
    assert (spec.cache.prefix_caching, spec.cache.host_swap_bytes) == ("Enabled", 16 * 1024**3)
    assert spec.scheduling.token_budget == 3456
    assert spec.scheduling.max_sequences == 64
    assert spec.scheduling.overlap_depth == 1
    assert (spec.scheduling.policy, spec.scheduling.fairness_unit) == ("WeightedFair", "KVByteSeconds")
    assert [(tenant.name, tenant.weight) for tenant in spec.live.admission.tenants] == [
        ("assistants", 3),
        ("evaluation", 1),
    ]
    assert spec.trusted_peers == ("10.42.7.0/24",)
    assert spec.live.scheduling.prefill_chunk_tokens == 3392
    assert spec.live.scheduling.max_prefill_tokens_per_request == 2048


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda spec: spec.pop("slo"), "spec: slo: is missing", id="a field that this CRD does not have"),
        pytest.param(
            lambda spec: spec["slo"].update(interTokenLatency="150"), "no duration", id="a duration without a unit"
        ),
        pytest.param(lambda spec: spec["cache"].update(capacity="much"), "no size", id="a size that is none"),
        pytest.param(lambda spec: spec["model"].update(source={}), "names no source", id="no source"),
        pytest.param(
            lambda spec: spec["admission"].update(trustedPeers=["fd00::/8", "10.0.0.1/8"]),
            "spec.admission.trustedPeers\\[1\\]: .10.0.0.1/8. is no network",
            id="a peer that is no network",
        ),
        pytest.param(
            lambda spec: spec["scheduling"].update(policy="WeightedFair"),
            "fairness_unit: must be set with policy WeightedFair",
            id="fairness without a unit",
        ),
        pytest.param(
            lambda spec: spec["resources"].update(limits={"nvidia.com/gpu": 2}),
            "accelerator.count asks for it",
            id="the device asked for twice",
        ),
        pytest.param(
            lambda spec: spec["cache"].update(blockTokens=12), "cache.block_tokens", id="the engine's own bound"
        ),
        pytest.param(
            lambda spec: spec["model"].update(adapters=[{"name": "chat", "path": "/a"}]),
            "spec.model.adapters: 'chat' is the model's own name",
            id="an adapter with the name that the model has without one",
        ),
        pytest.param(
            lambda spec: (
                spec["model"].update(adapters=[{"name": "sql", "path": "/a"}]),
                spec["accelerator"].update(count=2),
            ),
            "spec.model.adapters: adapters run on one device alone",
            id="adapters on two devices",
        ),
        pytest.param(
            lambda spec: (
                spec["model"].update(adapterLoading={"maxLoaded": 16, "maxRunning": 8, "directory": "/a"}),
                spec["runtime"].update(type="SGLang", image="lmsysorg/sglang:v0.5.23"),
            ),
            "spec.model.adapters: only Sluice's own engine",
            id="adapters for another engine",
        ),
    ],
)
def test_what_cannot_be_understood_names_the_field(change: Any, words: str) -> None:
    body = scene.body()
    change(body["spec"])

    with pytest.raises(InvalidSpec, match=words):
        parse(body)


def test_what_no_definition_fills_in_is_what_the_engine_takes_it_for() -> None:
    fields = schema.version_schema(manifest.load_crd(), "sluice.dev/v1alpha1")
    assert fields is not None
    loading = fields["properties"]["spec"]["properties"]["model"]["properties"]["adapterLoading"]["properties"]

    spec = parse(scene.body())

    assert (spec.runtime, spec.model.quantization, spec.adapters) == ("Sluice", "Auto", AdaptersConfig())
    assert AdaptersConfig() == AdaptersConfig(
        max_loaded=loading["maxLoaded"]["default"], max_running=loading["maxRunning"]["default"]
    )


def test_what_earlier_definitions_filled_in_is_no_change() -> None:
    left_out, written = scene.body(), scene.body()
    written["spec"]["model"]["quantization"], written["spec"]["runtime"]["type"] = "Auto", "Sluice"

    assert parse(left_out) == parse(written)


def test_adapters_are_on_the_model_s_volume_unless_their_path_is_absolute() -> None:
    adapters = [{"name": "sql", "path": "adapters/sql/"}, {"name": "law", "path": "/mnt/law"}]
    source = {"persistentVolumeClaim": {"claimName": "models", "path": "llama"}}
    body = scene.body()
    body["spec"]["model"] |= {"source": source, "adapters": adapters}
    before = parse(body)
    body["spec"]["model"]["adapterLoading"] = {"maxLoaded": 16, "maxRunning": 8, "directory": "adapters"}

    spec = parse(body)

    assert [source.path for source in spec.adapters.preloaded] == ["/var/lib/sluice/model/adapters/sql", "/mnt/law"]
    assert (before.adapters.directory, spec.adapters.directory) == ("", "/var/lib/sluice/model/adapters")
    assert spec.cost_basis == before.cost_basis, "what steps cost was measured without"


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("150ms", 150_000),
        ("2s", 2_000_000),
        ("1m30s", 90_000_000),
        ("1h", 3_600_000_000),
        ("1h1m1s1ms", 3_661_001_000),
        ("0s", 0),
        ("00150ms", 150_000),
    ],
)
def test_a_duration_in_microseconds(text: str, microseconds: int) -> None:
    assert parse_duration_us(text, "field") == microseconds


@pytest.mark.parametrize("text", ["", "150", "1.5s", "-1s", "1 s", "1us", "1d", "123456s", "1s1s1s1s1s", "1s\n"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec, match="field"):
        parse_duration_us(text, "field")


@pytest.mark.parametrize(
    ("text", "size"),
    [("256Mi", 268_435_456), ("2G", 2_000_000_000), ("1k", 1000), ("1Ti", 2**40), (4096, 4096), ("4096", 4096)],
)
def test_a_size_in_bytes(text: str | int, size: int) -> None:
    assert parse_quantity_bytes(text, "field") == size


@pytest.mark.parametrize("text", ["", "Mi", "1.5Gi", "-1", "1mi", "1 Gi", "1K"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec, match="field"):
        parse_quantity_bytes(text, "field")


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0.0ms"),
        (3_449, "3.4ms"),
        (12_300, "12ms"),
        (840_000, "840ms"),
        (2_500_000, "2.5s"),
        (90_000_000, "90s"),
        (123_456_789, "123s"),
    ],
)
def test_a_duration_for_people(microseconds: int, text: str) -> None:
    assert format_duration(microseconds) == text


@given(st.integers(0, 10**10))
def test_a_shown_duration_is_within_five_percent_or_a_twentieth_of_a_millisecond(microseconds: int) -> None:
    text = format_duration(microseconds)
    shown = float(text[:-2]) * 1000 if text.endswith("ms") else float(text[:-1]) * 1_000_000

    assert abs(shown - microseconds) <= max(0.05 * microseconds, 51)
