from __future__ import annotations

from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from engine.serving import IDENTITY, LIVE_FILE, HeldRunner, Served, clock, make_loaded, served
from metric_lines import check
from sluice_engine.serving.counters import Counters, Histogram
from sluice_engine.serving.metrics import EngineCollector
from sluice_engine.serving.service import EngineService


async def scrape(engine: Served) -> dict[str, float]:
    """Sample name with its labels → value."""
    async with engine.http.get("/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    return {
        sample.name + (f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_page_counts_what_happened() -> None:
    async with served() as engine:
        for text in ("say:abc", "fail"):
            body = {"model": "tiny", "prompt": text, "max_tokens": 9}
            await engine.post("/v1/completions", body)
        await engine.idle()
        page = await scrape(engine)

    assert page["sluice_engine_requests_ended_total{stop}"] == 1
    assert page["sluice_engine_requests_ended_total{failed}"] == 1
    assert page["sluice_engine_requests_ended_total{length}"] == 0
    assert page["sluice_engine_prompt_tokens_total"] == len("say:abc")
    assert page["sluice_engine_output_tokens_total"] == 3
    assert page["sluice_engine_time_to_first_token_seconds_count"] == 1
    assert page["sluice_engine_inter_token_latency_seconds_count"] == 2
    assert page["sluice_engine_queue_time_seconds_count"] == 1
    assert page["sluice_engine_steps_total"] == page["sluice_engine_step_duration_seconds_count"] == 5
    assert page["sluice_engine_kv_blocks"] == page["sluice_engine_kv_free_blocks"] == 64
    assert page["sluice_engine_requests{running}"] == page["sluice_engine_requests{waiting}"] == 0
    assert page["sluice_engine_phase{ready}"] == 1
    assert page["sluice_engine_build_info{1.2.3}"] == 1
    assert page["sluice_engine_loop_overhead_seconds_total"] > 0


async def test_the_page_says_what_requests_shared_and_what_the_host_holds() -> None:
    async with served() as engine:
        for _ in range(2):
            await engine.post("/v1/completions", {"model": "tiny", "prompt": "say:a and nothing else", "max_tokens": 9})
        await engine.idle()
        page = await scrape(engine)

    assert page["sluice_engine_prefix_queried_tokens_total"] == 2 * 22
    assert page["sluice_engine_prefix_hit_tokens_total"] == 20
    assert page["sluice_engine_prefix_hits_total"] == 1
    assert page["sluice_engine_kv_cached_blocks"] == (22 + 9 - 1) // 4, "what was answered, too"
    assert page["sluice_engine_kv_free_blocks"] == 64
    assert page["sluice_engine_swap_blocks"] == page["sluice_engine_swap_free_blocks"] == 8
    assert page["sluice_engine_swap_requests_total"] == 0


async def test_before_the_model_is_loaded_there_is_no_pool_to_report() -> None:
    service = EngineService(lambda _progress: make_loaded(HeldRunner()), clock)
    names = {metric.name for metric in EngineCollector(service, IDENTITY, "1", LIVE_FILE).collect()}

    assert "sluice_engine_phase" in names
    assert "sluice_engine_loading_bytes" in names
    assert "sluice_engine_kv_blocks" not in names


def test_a_histogram_counts_a_bound_inside_its_bucket() -> None:
    histogram = Histogram((10, 20))
    for duration_us in (0, 10, 11, 20, 21, 1000):
        histogram.observe(duration_us)

    assert histogram.copy().counts == (2, 2, 2)
    assert histogram.copy().sum_us == 1062


def test_a_copy_does_not_change_any_more() -> None:
    counters = Counters()
    before = counters.copy()
    counters.step_ran(5)

    assert sum(before.step.counts) == 0
    assert sum(counters.copy().step.counts) == 1


async def test_every_series_has_its_line_with_type_and_labels_and_no_line_is_stale() -> None:
    async with served() as engine, ClientSession(engine.url) as http, http.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))

    check("Engine", "sluice_engine_", families, {"version": frozenset({"1.2.3"}), "name": frozenset({"tiny"})})
