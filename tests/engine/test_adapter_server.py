"""LoRA adapters through the API: loaded and unloaded while others run, named by `model`, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.serving import Served, served, until
from engine.tiny_adapter import make_adapter
from sluice_engine.compute.adapters import AdapterStore
from sluice_engine.config import AdaptersConfig, AdapterSource, EngineConfig, ModelConfig, ModelSource, preloaded_key
from sluice_engine.errors import InvalidConfig
from sluice_engine.model_files.weights import open_tensors
from sluice_engine.serving.adapters import ADAPTER_FILES
from sluice_engine.text.grammars import Grammars
from tiny_model import make_tiny_llama

# So much that what is endless does not end by itself within a test.
ROOM = {"num_blocks": 50_000, "max_length": 190_000}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and adapters below `adapters`; one is a link that leads out, one holds such."""
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny_llama(folder / "model")
    for seed, name in enumerate(("sql", "legal", "poems")):
        make_adapter(model, folder / "adapters" / name, seed=seed)
    make_adapter(model, folder / "adapters" / "dora", seed=9, config={"use_dora": True})
    make_adapter(model, folder / "outside", seed=9)
    (folder / "adapters" / "link").symlink_to(folder / "outside")
    (folder / "adapters" / "borrowed").mkdir()
    for name in ADAPTER_FILES:
        (folder / "adapters" / "borrowed" / name).symlink_to(folder / "outside" / name)
    return folder


@asynccontextmanager
async def adapted(folder: Path, *, static: tuple[str, ...] = (), **options: Any) -> AsyncIterator[Served]:
    """An engine that may load from the folder, with some adapters there from the start."""
    store = AdapterStore(open_tensors(folder / "model").architecture, torch.float32, torch.device("cpu"))
    sources = tuple(AdapterSource(name=name, path=str(folder / "adapters" / name)) for name in static)
    for source in sources:
        store.load(preloaded_key(source.name), Path(source.path))
    directory = options.pop("directory", str(folder / "adapters"))
    config = AdaptersConfig(preloaded=sources, directory=directory, max_loaded=options.pop("max_loaded", 16))
    async with served(adapters_config=config, adapters=store, **options) as engine:
        yield engine


async def post_text(engine: Served, path: str, body: Any) -> tuple[int, str]:
    async with engine.http.post(path, json=body) as response:
        return response.status, await response.text()


async def models(engine: Served) -> list[str]:
    _, page = await engine.get("/v1/models")
    return [model["id"] for model in page["data"]]


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "say:Yes."}], **fields}


async def test_an_adapter_is_loaded_listed_named_and_unloaded(folder: Path) -> None:
    async with adapted(folder) as engine:
        status, page = await engine.post("/v1/chat/completions", chat("sql"))
        assert (status, page["error"]["code"]) == (404, "model_not_found")

        assert await post_text(engine, LOAD, {"lora_name": "sql", "lora_path": str(folder / "adapters/sql")}) == (
            200, "Success: LoRA adapter 'sql' added successfully.",
        )  # fmt: skip
        assert await post_text(engine, LOAD, {"lora_name": "law", "lora_path": "legal"}) == (
            200, "Success: LoRA adapter 'law' added successfully.",
        )  # fmt: skip

        assert await models(engine) == ["tiny", "law", "sql"]
        _, one = await engine.get("/v1/models/law")
        assert (one["parent"], one["root"]) == ("tiny", "legal")
        status, page = await engine.post("/v1/chat/completions", chat("law"))
        assert (status, page["model"], page["choices"][0]["message"]["content"]) == (200, "law", "Yes.")
        status, page = await engine.post("/v1/completions", {"model": "sql", "prompt": "say:No."})
        assert (status, page["model"]) == (200, "sql")
        _, state = await engine.get("/state")
        assert [(one["name"], one["rank"], one["retiring"]) for one in state["adapters"]] == [
            ("law", 4, False), ("sql", 4, False),
        ]  # fmt: skip
        num_bytes = state["adapters"][0]["num_bytes"]
        assert engine.registry.get_sample_value("sluice_engine_adapters", {"status": "served"}) == 2
        assert engine.registry.get_sample_value("sluice_engine_adapter_bytes") == 2 * num_bytes > 0

        assert await post_text(engine, UNLOAD, {"lora_name": "law"}) == (
            200, "Success: LoRA adapter 'law' removed successfully.",
        )  # fmt: skip
        status, page = await engine.post("/v1/chat/completions", chat("law"))
        assert (status, page["error"]["code"]) == (404, "model_not_found")
        assert "and the adapters sql" in page["error"]["message"]
        await until(lambda: engine.registry.get_sample_value("sluice_engine_adapter_bytes") == num_bytes)


async def test_an_unloaded_adapter_ends_with_the_requests_that_have_begun(folder: Path) -> None:
    """Its name may be loaded again meanwhile; what that computes is another's."""
    async with adapted(folder, static=("sql",), **ROOM) as engine:
        body = {"model": "sql", "prompt": "endless", "stream": True}
        async with engine.http.post("/v1/completions", json=body) as running:
            assert running.status == 200
            await running.content.readany()
            (first,) = {request.adapter for request in engine.scheduler.requests.values()}

            assert (await post_text(engine, UNLOAD, {"lora_name": "sql"}))[0] == 200
            assert (await engine.post("/v1/completions", {"model": "sql", "prompt": "say:No."}))[0] == 404
            _, state = await engine.get("/state")
            assert [(one["name"], one["retiring"]) for one in state["adapters"]] == [("sql", True)]

            assert (await post_text(engine, LOAD, {"lora_name": "sql", "lora_path": "sql"}))[0] == 200
            status, page = await engine.post("/v1/completions", {"model": "sql", "prompt": "say:Again."})
            assert (status, page["choices"][0]["text"]) == (200, "Again.")
            assert first in {request.adapter for request in engine.scheduler.requests.values()}, "it goes on"
            _, state = await engine.get("/state")
            assert sorted(one["retiring"] for one in state["adapters"]) == [False, True]
        await engine.idle()

        def retiring() -> float | None:
            return engine.registry.get_sample_value("sluice_engine_adapters", {"status": "retiring"})

        await until(lambda: retiring() == 0)
        assert await models(engine) == ["tiny", "sql"]


async def test_a_call_whose_adapter_goes_while_it_is_prepared_is_refused_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, unloaded = asyncio.Event(), asyncio.Event()

    async def waited_for(*_arguments: object, **_options: object) -> list[object]:
        prepared.set()
        await unloaded.wait()
        return [None]

    monkeypatch.setattr(Grammars, "constraints", waited_for)
    async with adapted(folder, static=("sql",)) as engine:
        body = chat("sql", response_format={"type": "json_object"})
        asking = asyncio.create_task(engine.post("/v1/chat/completions", body))
        await prepared.wait()
        assert (await post_text(engine, UNLOAD, {"lora_name": "sql"}))[0] == 200
        unloaded.set()
        status, page = await asking
        assert (status, page["error"]["code"]) == (404, "model_not_found")
        assert page["error"]["message"] == "The adapter sql was unloaded meanwhile."


async def test_a_request_waits_for_its_adapter_and_delays_nobody(folder: Path) -> None:
    async with adapted(folder, static=("sql", "legal"), most_adapters=1, **ROOM) as engine:
        body = {"model": "sql", "prompt": "endless", "stream": True}
        async with engine.http.post("/v1/completions", json=body) as running:
            await running.content.readany()
            waiting = asyncio.create_task(engine.post("/v1/completions", {"model": "legal", "prompt": "say:At last."}))
            await until(lambda: len(engine.scheduler.waiting) == 1)

            for model in ("tiny", "sql"):
                status, _ = await engine.post("/v1/completions", {"model": model, "prompt": "say:Me first."})
                assert status == 200
            assert not waiting.done()
            _, page = await engine.get("/steps?last=1")
            assert page["steps"][-1]["waiting_reasons"] == {"adapters_in_use": 1}
        status, answer = await waiting
        assert (status, answer["choices"][0]["text"]) == (200, "At last.")


NAME, PATH = "lora_name", "lora_path"
REFUSED: list[tuple[str, dict[str, Any], int, str, str]] = [
    (LOAD, {PATH: "sql"}, 400, NAME, "missing_required_parameter"),
    (LOAD, {NAME: "a"}, 400, PATH, "missing_required_parameter"),
    (LOAD, {NAME: "a b", PATH: "sql"}, 400, NAME, "invalid_value"),
    (LOAD, {NAME: "tiny", PATH: "sql"}, 400, NAME, "invalid_value"),
    (LOAD, {NAME: "poems", PATH: "sql"}, 400, NAME, "adapter_exists"),
    (LOAD, {NAME: "a", PATH: "dora"}, 400, PATH, "adapter_refused"),
    (LOAD, {NAME: "a", PATH: "nowhere"}, 400, PATH, "adapter_refused"),
    (LOAD, {NAME: "a", PATH: "../outside"}, 400, PATH, "adapter_refused"),
    (LOAD, {NAME: "a", PATH: "/etc"}, 400, PATH, "adapter_refused"),
    (LOAD, {NAME: "a", PATH: "link"}, 400, PATH, "adapter_refused"),
    (LOAD, {NAME: "a", PATH: "borrowed"}, 400, PATH, "adapter_refused"),
    (LOAD, {NAME: "a", PATH: "\ud800"}, 400, PATH, "invalid_value"),
    (LOAD, {NAME: "a", PATH: "\0"}, 400, PATH, "invalid_value"),
    (LOAD, {NAME: "a", PATH: "a" * 5000}, 400, PATH, "invalid_value"),
    (LOAD, {NAME: "a", PATH: "a" * 3000}, 400, PATH, "adapter_refused"),
    (LOAD, {NAME: "a", PATH: "sql", "load_inplace": True}, 400, "load_inplace", "unsupported_parameter"),
    (LOAD, {NAME: "a", PATH: "sql", "x": 1}, 400, "x", "unknown_parameter"),
    (UNLOAD, {NAME: "a"}, 404, NAME, "adapter_not_found"),
    (UNLOAD, {NAME: "tiny"}, 404, NAME, "adapter_not_found"),
]


async def test_what_is_refused_says_why_and_changes_nothing(folder: Path) -> None:
    async with adapted(folder, static=("poems",)) as engine:
        for path, body, wanted, param, code in REFUSED:
            status, page = await engine.post(path, body)
            told = (status, page["error"]["param"], page["error"]["code"])
            assert told == (wanted, param, code), f"{body}: {page}"
            assert "Traceback" not in page["error"]["message"]
        assert await models(engine) == ["tiny", "poems"]
        assert (await engine.post("/v1/completions", {"model": "poems", "prompt": "say:Still here."}))[0] == 200


async def test_there_are_never_more_than_may_be(folder: Path) -> None:
    async with adapted(folder, max_loaded=2) as engine:
        answers = await asyncio.gather(
            *(engine.http.post(LOAD, json={"lora_name": name, "lora_path": name}) for name in ("sql", "legal", "poems"))
        )
        assert sorted(answer.status for answer in answers) == [200, 200, 400]
        (refused,) = [await answer.json() for answer in answers if answer.status == 400]
        assert refused["error"]["code"] == "too_many_adapters"
        assert len(await models(engine)) == 3


async def test_without_a_directory_nothing_is_loaded_or_unloaded_at_run_time(folder: Path) -> None:
    async with adapted(folder, static=("sql",), directory="") as engine:
        for path, body in ((LOAD, {"lora_name": "a", "lora_path": "/"}), (UNLOAD, {"lora_name": "sql"})):
            status, page = await engine.post(path, body)
            assert (status, page["error"]["code"]) == (400, "adapter_loading_disabled")
        assert await models(engine) == ["tiny", "sql"]


def test_adapters_beside_several_devices_are_a_bad_configuration() -> None:
    """One device: whoever allows more decides there whether adapters go with it."""
    adapters = AdaptersConfig(directory="/adapters")
    model = ModelConfig(source=ModelSource(demo="smollm2-135m"), served_name="m")
    with pytest.raises(InvalidConfig):
        EngineConfig(model=model, adapters=adapters, accelerator_count=2)
    EngineConfig(model=model, adapters=adapters, accelerator_count=1)
