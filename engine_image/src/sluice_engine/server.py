"""HTTP over the Unix socket: routes, bodies, streams, and the one place where errors become answers.

It parses with `protocol`, prepares with `intake`, runs with `service`, and writes what `output` settles. Work that
takes long (large bodies, long prompts) goes to a small pool of threads, so that all other streams keep flowing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from sluice_engine.answer import Answer
from sluice_engine.codec import encode
from sluice_engine.core.request import Request
from sluice_engine.core.terms import InvalidTerms, Terms
from sluice_engine.core.terms import parse as parse_terms
from sluice_engine.errors import (
    BodyTooLarge,
    EngineNotReady,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from sluice_engine.grammars import Grammars
from sluice_engine.intake import Prompt, chat_prompt, chat_prompts, check_token_ids, completion_prompts, requests_of
from sluice_engine.live_file import LiveFile
from sluice_engine.live_state import Identity, engine_state, step_table
from sluice_engine.metrics import GrammarCollector
from sluice_engine.protocol.chat import ChatReply, parse_chat
from sluice_engine.protocol.completions import CompletionReply, parse_completion
from sluice_engine.protocol.generation import Generation
from sluice_engine.protocol.openapi import document
from sluice_engine.protocol.reply import Reply, ReplyHead
from sluice_engine.protocol.structure import Structure
from sluice_engine.protocol.tokens import parse_detokenize, parse_tokenize
from sluice_engine.publication import LoadedEngine
from sluice_engine.service import EngineService
from sluice_engine.steps_page import steps_page

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
# Below this, parsing and encoding take under a millisecond: less than handing the work to another thread and back.
INLINE_BYTES = 4096
MAX_STEPS_SHOWN = 4096
# What proxies log for a caller that closed the connection; it is never seen by one.
CLIENT_LEFT = 499

REQUEST_ID_HEADER = "x-sluice-request-id"
REQUEST_ID = web.RequestKey("request_id", str)
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
    ) -> None:
        self._service = service
        self._identity = identity
        self._registry = registry
        self._sources = sources
        self._live_file = live_file
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._created_s = sources.wall_clock_s()
        self._grammars = Grammars(service.clock)
        registry.register(GrammarCollector(self._grammars))

    def app(self) -> web.Application:
        """The application; run it with handler_cancellation, or a client that leaves is not noticed."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer_errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/v1/models", self.models),
                web.get("/openapi.json", self.openapi),
                web.get("/v1/models/{name:.+}", self.model),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/state", self.state),
                web.get("/steps", self.steps),
                web.get("/step-table", self.step_table),
            ]
        )
        app.on_cleanup.append(self._cleanup)
        return app

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """`/v1/chat/completions`."""
        request_id = self._request_id(http)
        engine = self._service.loaded()
        terms = _terms(http)
        raw = await http.read()
        arrival_us = self._service.clock()
        call = await self._off_loop(len(raw), lambda: parse_chat(raw))
        self._check_model(call.model)
        prompts = await self._off_loop(len(raw), lambda: chat_prompts(call, engine.tokenizer))
        head = self._head(f"chatcmpl-{request_id.removeprefix('req-')}", call.generation)
        reply = ChatReply(head)
        return await self._generate(http, engine, prompts, call.generation, reply, terms, arrival_us)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """`/v1/completions`."""
        request_id = self._request_id(http)
        engine = self._service.loaded()
        terms = _terms(http)
        raw = await http.read()
        arrival_us = self._service.clock()
        call = await self._off_loop(len(raw), lambda: parse_completion(raw))
        self._check_model(call.model)
        prompts = await self._off_loop(len(raw), lambda: completion_prompts(call, engine.tokenizer))
        head = self._head(f"cmpl-{request_id.removeprefix('req-')}", call.generation)
        reply = CompletionReply(head)
        return await self._generate(http, engine, prompts, call.generation, reply, terms, arrival_us)

    async def _generate(
        self,
        http: web.Request,
        engine: LoadedEngine,
        prompts: Sequence[Prompt],
        generation: Generation,
        reply: Reply,
        terms: Terms,
        arrival_us: int,
    ) -> web.StreamResponse:
        request_id = http[REQUEST_ID]
        requests = requests_of(
            prompts,
            generation,
            engine,
            request_id=request_id,
            terms=terms,
            arrival_us=arrival_us,
            draw_seed=self._sources.draw_seed,
        )
        await self._constrain(requests, generation.structure, engine)
        answer = Answer(requests, engine.tokenizer, generation, prompts)
        with self._service.submit(requests) as stream:
            if generation.stream:
                if terms.bound_us is not None:
                    # Until it has begun, a missed deadline can still be an answer of its own.
                    await stream.begun()
                response = _event_stream(request_id)
                await response.prepare(http)
                await answer.write(stream, reply, response)
                await response.write_eof()
                return response
            body = await answer.whole(stream, reply)
        return _json(body, request_id)

    async def _constrain(self, requests: Sequence[Request], structure: Structure | None, engine: LoadedEngine) -> None:
        """Wait for the grammar that the answers have to follow, in a queue of its own."""
        if structure is None:
            return
        first = requests[0]
        bounds = [bound for bound in (first.first_token_deadline_us, first.finish_deadline_us) if bound is not None]
        constraints = await self._grammars.constraints(
            structure,
            engine.tokenizer,
            engine.vocab_size,
            request_id=first.gate_id,
            count=len(requests),
            until_us=min(bounds, default=None),
        )
        for request, constraint in zip(requests, constraints, strict=True):
            request.constraint = constraint

    def _head(self, reply_id: str, generation: Generation) -> ReplyHead:
        return ReplyHead(
            id=reply_id,
            model=self._identity.served_name,
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

    def _check_model(self, model: str | None) -> None:
        served = self._identity.served_name
        if model not in {None, served}:
            raise NotFound(
                f"the model {json.dumps(model)[:100]} does not exist; this engine serves {served}",
                param="model",
                code="model_not_found",
            )

    async def _off_loop(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, done in the pool where it may take long."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        """`/tokenize`: the token ids of a prompt, or of a conversation as the chat template writes it."""
        engine = self._service.loaded()
        raw = await http.read()

        def work() -> list[int]:
            call = parse_tokenize(raw)
            self._check_model(call.model)
            if call.prompt is None:
                return chat_prompt(call.messages, engine.tokenizer).tokens
            return engine.tokenizer.encode(call.prompt, add_special=call.add_special)

        tokens = await self._off_loop(len(raw), work)
        return _json({"count": len(tokens), "max_model_len": engine.max_length_tokens, "tokens": tokens})

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        """`/detokenize`: the text of token ids, special ones by their names, so that it can be encoded again."""
        engine = self._service.loaded()
        raw = await http.read()

        def work() -> str:
            call = parse_detokenize(raw)
            self._check_model(call.model)
            check_token_ids("tokens", call.tokens, engine.tokenizer.vocab_size)
            return engine.tokenizer.written(call.tokens)

        return _json({"prompt": await self._off_loop(len(raw), work)})

    async def models(self, _http: web.Request) -> web.StreamResponse:
        """`/v1/models`: the one model."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, http: web.Request) -> web.StreamResponse:
        """`/v1/models/NAME`: the one model, by its name."""
        self._check_model(http.match_info["name"])
        return _json(self._model())

    def _model(self) -> dict[str, object]:
        engine = self._service.loaded()
        return {
            "id": self._identity.served_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "sluice",
            "max_model_len": engine.max_length_tokens,
        }

    async def openapi(self, _http: web.Request) -> web.StreamResponse:
        """`/openapi.json`: the API as a document."""
        return _json(document(self._identity.served_name, version("sluice-engine")))

    async def health(self, _http: web.Request) -> web.StreamResponse:
        """`/health`: 200 when requests are taken."""
        self._service.loaded()
        if self._service.hung():
            raise EngineNotReady("a step has been running far beyond its predicted time")
        return _json({"status": "ready"})

    async def metrics(self, _http: web.Request) -> web.StreamResponse:
        """`/metrics`: in the plain text format, so that the gate can put its own page before it."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def state(self, _http: web.Request) -> web.StreamResponse:
        """`/state`: `EngineState`, also while a step or the start runs."""
        grammars = self._grammars.state()
        return _json(encode(engine_state(self._service, self._identity, self._live_file.problem, grammars)))

    async def step_table(self, _: web.Request) -> web.StreamResponse:
        """`/step-table`: what steps cost here, as learned by now."""
        table = step_table(self._service)
        if table is None:
            raise EngineNotReady("the engine has measured no step times yet")
        return _json(table)

    async def steps(self, http: web.Request) -> web.StreamResponse:
        """`/steps?last=N`: the last step records, and who ended meanwhile."""
        text = http.query.get("last", "100")
        if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= MAX_STEPS_SHOWN):
            raise InvalidRequest.field("last", f"must be 1 to {MAX_STEPS_SHOWN}")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(http)
        for piece in steps_page(self._service, int(text)):
            await response.write(piece)
            await asyncio.sleep(0)  # the streams' turn
        await response.write_eof()
        return response

    async def _cleanup(self, _app: web.Application) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()


def _terms(http: web.Request) -> Terms:
    """Whoever reaches this socket is the gate, or the pod itself."""
    try:
        return parse_terms(http.headers, trusted=True, by_gate=True)
    except InvalidTerms as error:
        raise InvalidRequest.field(error.header, error.problem) from error


def _event_stream(request_id: str) -> web.StreamResponse:
    return web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            REQUEST_ID_HEADER: request_id,
        }
    )


def _error(error: RequestError, request_id: str | None = None) -> web.Response:
    response = _json(error.body(), request_id, error.status)
    if error.should_retry is not None:
        response.headers["x-should-retry"] = "true" if error.should_retry else "false"
    return response


def _json(body: object, request_id: str | None = None, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
        headers={
            "Content-Type": "application/json",
            **({REQUEST_ID_HEADER: request_id} if request_id is not None else {}),
        },
    )


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as an OpenAI error object."""
    try:
        return await handler(request)
    except RequestError as error:
        answer = error
    except web.HTTPRequestEntityTooLarge:
        answer = BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        answer = MethodNotAllowed(f"the route {request.path} takes {allowed}, not {request.method}")
    except web.HTTPNotFound:
        answer = NotFound(f"there is no {request.path[:100]} here")
    except web.HTTPException as error:
        answer = InvalidRequest(error.reason)
    except ConnectionError:
        return web.Response(status=CLIENT_LEFT)  # there is nobody to answer
    except Exception:
        log.exception("request failed", extra={"path": request.path})
        answer = RequestError("internal error")
    with contextlib.suppress(KeyError):
        return _error(answer, request[REQUEST_ID])
    return _error(answer)
