"""HTTP over the Unix socket: routes, bodies and streams of what clients ask for.

It parses with `protocol`, prepares with `intake`, runs with `service`, and writes what `output` settles. What is read
of the engine itself is `pages`, how an answer looks and how errors become one `responses`. Work that takes long (large
bodies, long prompts) goes to a small pool of threads, so that all other streams keep flowing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry

from sluice_engine.config import AdaptersConfig
from sluice_engine.core.order.deadlines import next_deadline_us
from sluice_engine.core.request import Request
from sluice_engine.core.terms import InvalidTerms, Terms
from sluice_engine.core.terms import parse as parse_terms
from sluice_engine.errors import InvalidRequest
from sluice_engine.live_file import LiveFile
from sluice_engine.protocol.adapters import parse_load, parse_unload
from sluice_engine.protocol.chat import ChatReply, parse_chat
from sluice_engine.protocol.completions import CompletionReply, parse_completion
from sluice_engine.protocol.generation import Generation
from sluice_engine.protocol.reply import Reply, ReplyHead
from sluice_engine.protocol.structure import Structure
from sluice_engine.protocol.tokens import parse_detokenize, parse_tokenize
from sluice_engine.serving.adapters import Adapters
from sluice_engine.serving.answer import Answer, ToolCallCounts
from sluice_engine.serving.chat_prompt import Prompt, chat_prompt
from sluice_engine.serving.intake import (
    check_token_ids,
    completion_prompts,
    prepared_chat,
    requests_of,
)
from sluice_engine.serving.live_state import Identity
from sluice_engine.serving.metrics import AdapterCollector, GrammarCollector, ToolCallCollector
from sluice_engine.serving.pages import Pages
from sluice_engine.serving.publication import LoadedEngine
from sluice_engine.serving.responses import (
    MAX_BODY_BYTES,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    EventWriter,
    answer_errors,
    body_of,
    event_stream,
    json_response,
)
from sluice_engine.serving.service import EngineService
from sluice_engine.text.grammars import Grammars
from sluice_engine.text.tool_calls import ToolCalling

# Below this, parsing and encoding take under a millisecond: less than handing the work to another thread and back.
INLINE_BYTES = 4096
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the server takes from the world."""

    wall_clock_s: Callable[[], int]
    draw_seed: Callable[[], int]
    new_request_id: Callable[[], str]


class EngineServer:
    """One engine's HTTP side."""

    def __init__(
        self,
        service: EngineService,
        identity: Identity,
        registry: CollectorRegistry,
        sources: Sources,
        live_file: LiveFile,
        adapters: AdaptersConfig | None = None,
    ) -> None:
        """`adapters`: which there are, and which there may be; none without."""
        self._service = service
        self._identity = identity
        self._sources = sources
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._grammars = Grammars(service.clock)
        registry.register(GrammarCollector(self._grammars))
        self._tool_calls = ToolCallCounts()
        registry.register(ToolCallCollector(self._tool_calls))
        self._adapters = Adapters(service, identity.served_name, adapters or AdaptersConfig())
        registry.register(AdapterCollector(self._adapters))
        created_s = sources.wall_clock_s()
        self._pages = Pages(service, identity, registry, live_file, self._grammars, self._adapters, created_s=created_s)

    def app(self) -> web.Application:
        """The application; run it with handler_cancellation, or a client that leaves is not noticed."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.post("/v1/load_lora_adapter", self.load_adapter),
                web.post("/v1/unload_lora_adapter", self.unload_adapter),
                *self._pages.routes(),
            ]
        )
        app.on_cleanup.append(self._cleanup)
        return app

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """`/v1/chat/completions`."""
        request_id = self._request_id(http)
        engine = self._service.loaded()
        terms = _terms(http)
        raw = await body_of(http)
        arrival_us = self._service.clock()
        call = await self._off_loop(len(raw), lambda: parse_chat(raw))
        adapter = self._adapters.key_of(call.model)
        chat = await self._off_loop(len(raw), lambda: prepared_chat(call, engine.tokenizer))
        head = self._head(f"chatcmpl-{request_id.removeprefix('req-')}", call.model, chat.generation)
        return await self._generate(
            http, [chat.prompt], chat.generation, ChatReply(head), terms, arrival_us, adapter, chat.calling
        )

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """`/v1/completions`."""
        request_id = self._request_id(http)
        engine = self._service.loaded()
        terms = _terms(http)
        raw = await body_of(http)
        arrival_us = self._service.clock()
        call = await self._off_loop(len(raw), lambda: parse_completion(raw))
        adapter = self._adapters.key_of(call.model)
        prompts = await self._off_loop(len(raw), lambda: completion_prompts(call, engine.tokenizer))
        head = self._head(f"cmpl-{request_id.removeprefix('req-')}", call.model, call.generation)
        reply = CompletionReply(head)
        return await self._generate(http, prompts, call.generation, reply, terms, arrival_us, adapter)

    async def _generate(
        self,
        http: web.Request,
        prompts: Sequence[Prompt],
        generation: Generation,
        reply: Reply,
        terms: Terms,
        arrival_us: int,
        adapter: str,
        calling: ToolCalling | None = None,
    ) -> web.StreamResponse:
        request_id, engine = http[REQUEST_ID], self._service.loaded()
        requests = requests_of(
            prompts,
            generation,
            engine,
            request_id=request_id,
            terms=terms,
            arrival_us=arrival_us,
            draw_seed=self._sources.draw_seed,
            adapter=adapter,
        )
        await self._constrain(requests, generation.structure, engine)
        self._adapters.check_served(adapter)
        answer = Answer(requests, engine.tokenizer, generation, prompts, calling, self._tool_calls)
        with self._service.submit(requests) as stream:
            if generation.stream:
                if terms.bound_us is not None:
                    # Until it has begun, a missed deadline can still be an answer of its own.
                    await stream.begun()
                response = event_stream(request_id)
                await response.prepare(http)
                writer = EventWriter(http, response)
                await answer.write(stream, reply, writer)
                await writer.end()
                return response
            body = await answer.whole(stream, reply)
        return json_response(body, request_id)

    async def _constrain(self, requests: Sequence[Request], structure: Structure | None, engine: LoadedEngine) -> None:
        """Wait for the grammar that the answers have to follow, in a queue of its own."""
        if structure is None:
            return
        first = requests[0]
        constraints = await self._grammars.constraints(
            structure,
            engine.tokenizer,
            engine.vocab_size,
            request_id=first.gate_id,
            count=len(requests),
            until_us=next_deadline_us(first),
        )
        for request, constraint in zip(requests, constraints, strict=True):
            request.constraint = constraint

    def _head(self, reply_id: str, model: str | None, generation: Generation) -> ReplyHead:
        return ReplyHead(
            id=reply_id,
            model=model or self._identity.served_name,
            created_s=self._sources.wall_clock_s(),
            system_fingerprint=f"fp_{self._identity.engine_config_hash}",
            logprobs=generation.logprobs,
            include_usage=generation.include_usage,
            service_tier=generation.served_tier,
        )

    def _request_id(self, http: web.Request) -> str:
        given = http.headers.get(REQUEST_ID_HEADER)
        request_id = self._sources.new_request_id() if given is None else given
        if not _REQUEST_ID.fullmatch(request_id):
            raise InvalidRequest.field(REQUEST_ID_HEADER, "must be 1 to 128 letters, digits or . _ : -")
        http[REQUEST_ID] = request_id
        return request_id

    async def _off_loop(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, done in the pool where it may take long."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        """`/tokenize`: the token ids of a prompt, or of a conversation as the chat template writes it."""
        engine = self._service.loaded()
        raw = await body_of(http)

        def work() -> list[int]:
            call = parse_tokenize(raw)
            self._adapters.key_of(call.model)
            if call.prompt is None:
                return chat_prompt(call.messages, call.tools, engine.tokenizer).tokens
            return engine.tokenizer.encode(call.prompt, add_special=call.add_special)

        tokens = await self._off_loop(len(raw), work)
        return json_response({"count": len(tokens), "max_model_len": engine.max_length_tokens, "tokens": tokens})

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        """`/detokenize`: the text of token ids, special ones by their names, so that it can be encoded again."""
        engine = self._service.loaded()
        raw = await body_of(http)

        def work() -> str:
            call = parse_detokenize(raw)
            self._adapters.key_of(call.model)
            check_token_ids("tokens", call.tokens, engine.tokenizer.vocab_size)
            return engine.tokenizer.written(call.tokens)

        return json_response({"prompt": await self._off_loop(len(raw), work)})

    async def load_adapter(self, http: web.Request) -> web.StreamResponse:
        """`/v1/load_lora_adapter`: serve an adapter that lies in the directory for such. Who may ask is the gate's."""
        asked = parse_load(await body_of(http))
        await self._adapters.load(asked)
        return web.Response(text=f"Success: LoRA adapter '{asked.name}' added successfully.")

    async def unload_adapter(self, http: web.Request) -> web.StreamResponse:
        """`/v1/unload_lora_adapter`: serve it no more; requests that have begun end with it."""
        name = parse_unload(await body_of(http))
        self._adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _cleanup(self, _app: web.Application) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
        self._adapters.close()


def _terms(http: web.Request) -> Terms:
    """Whoever reaches this socket is the gate, or the pod itself."""
    try:
        return parse_terms(http.headers, trusted=True, by_gate=True)
    except InvalidTerms as error:
        raise InvalidRequest.field(error.header, error.problem) from error
