"""The names that calls may give as `model`: the model's own, and those of the LoRA adapters that are loaded beside it.

Owns the names and who may load what; the weights are the engine's. An adapter that is unloaded takes no new requests at
once, those that have begun end with it, then its memory is free. Each load has a key of its own, so that nothing of an
earlier one (KV blocks above all) is ever taken for a later one of the same name. Start reading at `key_of` and `load`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice_engine.config import AdaptersConfig, preloaded_key
from sluice_engine.core.state import AdapterState
from sluice_engine.errors import AdapterRefused, InvalidRequest, NotFound
from sluice_engine.model_files.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from sluice_engine.protocol.adapters import LoadAdapter
from sluice_engine.serving.publication import AdapterShelf
from sluice_engine.serving.service import EngineService

log = logging.getLogger(__name__)

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)


class Adapters:
    """The adapters of one engine, by name. Its methods belong to the event loop."""

    def __init__(self, service: EngineService, served_name: str, config: AdaptersConfig) -> None:
        self._service = service
        self._served_name = served_name
        self._config = config
        self._paths = {source.name: source.path for source in config.preloaded}
        self._keys = {source.name: preloaded_key(source.name) for source in config.preloaded}
        self._loading: set[str] = set()
        self._retiring: dict[str, str] = {}
        """Key → name of those that end with their last request."""
        self._num_loads = 0
        # One at a time: two that each fit the memory left may not fit together.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")

    def key_of(self, model: str | None) -> str:
        """The adapter that a call with this `model` runs with; empty for the model alone.

        Raises:
            NotFound: there is no such model and no such adapter.
        """
        if model in {None, self._served_name}:
            return ""
        key = self._keys.get(str(model))
        if key is None:
            more = f", and the adapters {', '.join(self.names())[:200]}" if self._keys else ""
            raise NotFound(
                f"the model {json.dumps(model)[:100]} does not exist; this engine serves {self._served_name}{more}",
                param="model",
                code="model_not_found",
            )
        return key

    def check_served(self, key: str) -> None:
        """Whether what a call is to run with is still served when it is about to be queued.

        Raises:
            NotFound: it was unloaded meanwhile.
        """
        if key and key not in self._keys.values():
            name = key.rpartition("#")[0]
            raise NotFound(f"the adapter {name} was unloaded meanwhile", param="model", code="model_not_found")

    def names(self) -> list[str]:
        """Names of all adapters that take requests."""
        return sorted(self._keys)

    def path(self, name: str) -> str:
        """Where an adapter came from."""
        return self._paths[name]

    def state(self) -> tuple[AdapterState, ...]:
        """All that take memory, by name; nothing before the engine is loaded."""
        engine = self._service.engine
        if engine is None or engine.adapters is None:
            return ()
        listed = [(name, key, False) for name, key in self._keys.items()]
        listed += [(name, key, True) for key, name in self._retiring.items()]
        return tuple(_state(engine.adapters, *entry) for entry in sorted(listed))

    async def load(self, asked: LoadAdapter) -> None:
        """Serve an adapter from now on.

        Raises:
            InvalidRequest: the name is taken, there are too many, loading is not allowed, or the adapter is refused.
            EngineNotReady: the engine takes no requests.
        """
        shelf = self._shelf()
        name = asked.name
        if name == self._served_name:
            raise InvalidRequest.field("lora_name", f"{name} is the model itself")
        if name in self._keys or name in self._loading:
            raise InvalidRequest.field("lora_name", f"{name} is loaded already; unload it first", code="adapter_exists")
        held = len(self._keys) + len(self._loading) + len(self._retiring)
        if held >= self._config.max_loaded:
            ending = f", {len(self._retiring)} of which end with their last request" if self._retiring else ""
            raise InvalidRequest.field(
                "lora_name", f"{held} adapters are loaded{ending}; no more may be: unload one first",
                code="too_many_adapters",
            )  # fmt: skip
        self._loading.add(name)
        self._num_loads += 1
        key = f"{name}#{self._num_loads}"

        def work() -> tuple[int, int]:
            return shelf.load(key, _within(self._config.directory, asked.path))

        try:
            # Shielded: a caller that leaves does not leave memory behind that nobody knows of.
            loading = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._pool, work))
            loading.add_done_callback(lambda done: self._loaded(asked, key, done))
            rank, num_bytes = await asyncio.shield(loading)
        except AdapterRefused as error:
            raise InvalidRequest.field("lora_path", str(error), code="adapter_refused") from error
        log.info("adapter loaded", extra={"adapter": name, "rank": rank, "bytes": num_bytes})

    def unload(self, name: str) -> None:
        """Take no more requests for an adapter; its memory is free once those that have begun have ended.

        Raises:
            NotFound: there is no such adapter.
            InvalidRequest: nothing is loaded or unloaded at run time here.
            EngineNotReady: the engine takes no requests.
        """
        self._shelf()
        key = self._keys.pop(name, None)
        if key is None:
            raise NotFound(f"the adapter {name} is not loaded", param="lora_name", code="adapter_not_found")
        del self._paths[name]
        self._retiring[key] = name
        self._service.retire_adapter(key, lambda: self._freed(key))

    def close(self) -> None:
        """Load no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _shelf(self) -> AdapterShelf:
        shelf = self._service.loaded().adapters
        if shelf is None or not self._config.directory:
            raise InvalidRequest(
                "adapters are not loaded or unloaded at run time here: the service's manifest names no directory for "
                "them (model.adapterLoading.directory)",
                code="adapter_loading_disabled",
            )
        return shelf

    def _loaded(self, asked: LoadAdapter, key: str, done: asyncio.Future[tuple[int, int]]) -> None:
        self._loading.discard(asked.name)
        if not done.cancelled() and done.exception() is None:
            self._keys[asked.name], self._paths[asked.name] = key, asked.path

    def _freed(self, key: str) -> None:
        name = self._retiring.pop(key)
        log.info("adapter freed", extra={"adapter": name})


def _state(shelf: AdapterShelf, name: str, key: str, retiring: bool) -> AdapterState:  # noqa: FBT001  # a column
    rank, num_bytes = shelf.size(key)
    return AdapterState(name=name, rank=rank, num_bytes=num_bytes, retiring=retiring)


def _within(directory: str, path: str) -> Path:
    """The path, absolute or from the directory on, with all links followed: nothing outside is opened.

    Raises:
        AdapterRefused: it leads elsewhere, or nowhere.
    """
    try:
        root = Path(directory).resolve()
        wanted = Path(root, path).resolve()
        is_there = wanted.is_relative_to(root) and wanted.is_dir()
        leads_out = [name for name in ADAPTER_FILES if not (wanted / name).resolve().is_relative_to(root)]
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterRefused(f"{path[:200]} cannot be read") from error
    if not is_there:
        raise AdapterRefused(f"{path[:200]} is no directory within {directory}")
    if leads_out:
        raise AdapterRefused(f"{path[:200]}: {leads_out[0]} is a link that leads out of {directory}")
    return wanted
