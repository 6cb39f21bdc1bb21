"""A whole engine without a model: service and server over a runner that says what its prompt tells it to say.

`say:TEXT` in a prompt is answered with TEXT, `{seed}` and `{choice}` filled in, `{nl}` for a new line, `{special}` for
the first special token beyond the usual ones; of several the last counts. `endless` never ends; `fail` ends in an error
of its own; `crash` breaks the whole step.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, web
from prometheus_client import CollectorRegistry

from engine.scripted import SampledToken, ScriptedRunner, make_limits
from engine.tiny_model import EOS, FIRST_SPECIAL, tiny_tokenizer
from sluice_engine.config import AdaptersConfig
from sluice_engine.core.blocks import BlockPool
from sluice_engine.core.derivation import Derivation
from sluice_engine.core.emissions import Emissions
from sluice_engine.core.host_pool import HostPool
from sluice_engine.core.link import Link
from sluice_engine.core.loop import EngineLoop
from sluice_engine.core.order.policy import Policies
from sluice_engine.core.plan import Logprob, ScheduledRequest, StepPlan, StepResult
from sluice_engine.core.prefix_cache import PrefixCache
from sluice_engine.core.scheduler import Scheduler
from sluice_engine.core.state import DerivedLimits, LoadingProgress, PrefillCost, StepCost
from sluice_engine.core.steptime import PlanningProfile
from sluice_engine.core.suspension import SwapSpace
from sluice_engine.core.tuning import Tuning
from sluice_engine.live_config import LiveConfig, SLOConfig
from sluice_engine.live_file import live_file
from sluice_engine.serving.live_state import Identity
from sluice_engine.serving.metrics import register
from sluice_engine.serving.publication import AdapterShelf, LoadedEngine
from sluice_engine.serving.server import EngineServer, Sources
from sluice_engine.serving.service import EngineService
from sluice_engine.text.tokenizer import Tokenizer

TOKENIZER = tiny_tokenizer()
BLOCK_TOKENS = 4


def clock() -> int:
    return time.monotonic_ns() // 1000


def told(entry: ScheduledRequest) -> SampledToken:
    request = entry.request
    prompt = TOKENIZER.decode([token_id for token_id in request.tokens[: request.num_prompt] if token_id <= EOS])
    position = request.num_output
    if "crash" in prompt:
        raise RuntimeError("the device is on fire")
    if "fail" in prompt:
        return SampledToken(0, error="its logits are not finite")
    if "endless" in prompt:
        token_id = b"ab"[position % 2]
    else:
        said = re.findall(r"say:([^\n]*)", prompt)
        text = said[-1] if said else "Hello."
        text = text.replace("{seed}", str(request.sampling.seed)).replace("{choice}", str(request.sampling.choice))
        spelled = [list(part.encode()) for part in text.replace("{nl}", "\n").split("{special}")]
        answer = [*spelled[0], *(token_id for part in spelled[1:] for token_id in (FIRST_SPECIAL, *part)), EOS]
        token_id = answer[min(position, len(answer) - 1)]
    if not request.sampling.logprobs:
        return SampledToken(token_id)
    top = tuple((token_id + rank, -float(position) - rank) for rank in range(request.sampling.top_logprobs))
    return SampledToken(token_id, Logprob(-float(position), top))


class HeldRunner(ScriptedRunner):
    """Steps run while `may_step` is set; `stepping` is set while one waits for it."""

    def __init__(self) -> None:
        super().__init__(BLOCK_TOKENS, told)
        self.may_step = threading.Event()
        self.may_step.set()
        self.stepping = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        self.stepping.set()
        assert self.may_step.wait(30), "a test forgot to let the runner go on"
        self.stepping.clear()
        del self.plans[:]  # long runs keep nothing
        return super().execute(plan)


@dataclass
class Served:
    """A running engine, and what a test may look into."""

    service: EngineService
    runner: HeldRunner
    scheduler: Scheduler
    http: ClientSession
    url: str
    registry: CollectorRegistry
    closed: list[str] = field(default_factory=list)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def idle(self) -> None:
        """Return once the engine holds nothing."""
        await until(lambda: self.service.held_choices() == 0)
        # Commands are taken in order: once this one has run, every abort before it has been taken too.
        taken = threading.Event()

        def mark(_engine: LoadedEngine) -> Emissions:
            taken.set()
            return Emissions()

        self.service._command(mark)
        await until(lambda: taken.is_set() and not self.scheduler.requests)
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert len(self.scheduler.waiting) == 0


async def until(holds: Callable[[], bool]) -> None:
    """Give way to everybody else until it holds."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # the engine's thread has no asyncio event to wait for
            await asyncio.sleep(0)


def make_loaded(
    runner: HeldRunner,
    *,
    num_blocks: int = 64,
    max_length: int = 200,
    max_sequences: int = 8,
    tokenizer: Tokenizer = TOKENIZER,
    adapters: AdapterShelf | None = None,
    most_adapters: int = 8,
) -> LoadedEngine:
    limits = make_limits(max_sequences=max_sequences, token_budget=64, block_tokens=BLOCK_TOKENS)
    pool = BlockPool(num_blocks, BLOCK_TOKENS)
    scheduler = Scheduler(
        limits,
        pool,
        PlanningProfile(),
        max_length_tokens=max_length,
        policies=Policies(resume="Recompute"),  # this runner copies nothing
        prefix=PrefixCache(pool),
        space=SwapSpace(HostPool(8, BLOCK_TOKENS), Link(10, 20, 30)),
        budgets={"adapters": most_adapters},
    )
    told = Derivation(
        derived=DerivedLimits(feasible=True, chunk_ceiling_tokens=64, token_budget=64, max_sequences=max_sequences),
        limits=limits,
        step_cost=StepCost(fixed_us=1, decode_us=2, per_prefill_token_ns=3),
        prefill_cost=PrefillCost(per_token_ns=3, per_prior_pair_ps=4),
        decode_curve_us=((1, 10),),
        decode_context_ps=5,
    )
    return LoadedEngine(
        loop=EngineLoop(scheduler, runner, clock),
        tuning=Tuning(scheduler, LIVE, told, lambda _live, _percent: told),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        adapters=adapters,
        keep=lambda: None,
        close=lambda: None,
    )


IDENTITY = Identity(boot_id="boot", served_name="tiny", engine_config_hash="e", live_config_hash="l")
LIVE = LiveConfig(slo=SLOConfig(time_to_first_token_us=2_000_000, inter_token_latency_us=150_000))
LIVE_FILE = live_file("/nowhere/live.json")


@asynccontextmanager
async def served(
    load: Callable[[Callable[[LoadingProgress], None]], LoadedEngine] | None = None,
    adapters_config: AdaptersConfig | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """A server on a loopback port over a scripted engine."""
    runner = HeldRunner()
    loaded = make_loaded(runner, **options)
    service = EngineService(load or (lambda _progress: loaded), clock)
    registry = CollectorRegistry()
    register(registry, service, IDENTITY, "1.2.3", LIVE_FILE)
    ids = itertools.count()
    sources = Sources(
        wall_clock_s=lambda: 1_700_000_000, draw_seed=lambda: 42, new_request_id=lambda: f"req-{next(ids)}"
    )
    app = EngineServer(service, IDENTITY, registry, sources, LIVE_FILE, adapters_config).app()
    web_runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5)
    await web_runner.setup()
    site = web.TCPSite(web_runner, "127.0.0.1", 0)
    await site.start()
    service.start()
    if load is None:
        await service.ready()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{port}"
    async with ClientSession(url) as http:
        try:
            yield Served(service, runner, loaded.loop.scheduler, http, url, registry)
        finally:
            runner.may_step.set()
            service.close()
            await web_runner.cleanup()
            await service.ended()
