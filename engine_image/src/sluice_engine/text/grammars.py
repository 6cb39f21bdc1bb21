"""Grammars compiled in a thread of their own: a request waits for its grammar here, and delays nobody but its like.

Owns what was compiled, and the queue of those who wait. Its methods belong to the event loop. It knows no batch: what
it hands out limits one request's tokens, in the thread that samples. How a grammar is compiled is `grammar_compiler`'s.
Start reading at `Grammars.constraints`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_engine.core.constraint import ConstraintBroken
from sluice_engine.core.state import GrammarState, GrammarWait
from sluice_engine.errors import DeadlineMissed, EngineOverloaded, InvalidRequest
from sluice_engine.protocol.structure import Structure
from sluice_engine.text.grammar_compiler import Compiled, TokenConstraint, compile_grammar, guarded, vocabulary
from sluice_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# The compiler recurses: one definition of a schema that leads to the next takes some 100 KB, and 64 KiB of schema hold
# 2,000 of them. Of a stack only what was touched is memory.
_STACK_BYTES = 512 * 2**20
# With what its requests have explored, one takes some ten megabytes at worst.
MOST_KEPT = 32
# Each is compiled in milliseconds, at worst in half a second; four tools with 64 KiB of schema each took 1.5 s.
MOST_WAITING = 64


@dataclass(slots=True)
class _Pending:
    """A grammar that is being compiled, or waits for that."""

    future: Future[Compiled | str]
    done: asyncio.Future[Compiled | str]
    """The same, for the event loop."""
    waiters: dict[str, int] = field(default_factory=dict)
    """Requests, and since when they wait."""


class Grammars:
    """The compiled grammars of one model, and who waits for one."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock`: monotonic µs."""
        self._clock = clock
        self._thread: ThreadPoolExecutor | None = None
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], Compiled | str] = OrderedDict()
        """By kind and source: what came of it, or why nothing did."""
        self._pending: dict[tuple[str, str], _Pending] = {}
        self.found_total = 0
        self.compiled_total = 0
        self.refused_total = 0
        self.compile_us_total = 0

    def state(self) -> GrammarState:
        """Who waits, longest first, and what was done."""
        now_us = self._clock()
        waits = [
            GrammarWait(id=request_id, waited_us=now_us - since_us, compiling=pending.future.running())
            for pending in self._pending.values()
            for request_id, since_us in pending.waiters.items()
        ]
        return GrammarState(
            waiting=tuple(sorted(waits, key=lambda wait: -wait.waited_us)),
            kept=len(self._kept),
            found_total=self.found_total,
            compiled_total=self.compiled_total,
            refused_total=self.refused_total,
            compile_us_total=self.compile_us_total,
        )

    async def constraints(
        self,
        structure: Structure,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        request_id: str,
        count: int,
        until_us: int | None,
    ) -> list[TokenConstraint]:
        """As many ways through a grammar, each for one request; compiled once, however many want it.

        Raises:
            InvalidRequest: it does not compile, and why.
            EngineOverloaded: too many wait for theirs.
            DeadlineMissed: `until_us` came first.
        """
        key = structure.kind, structure.source
        compiled = self._kept.get(key)
        if compiled is None or (isinstance(compiled, Compiled) and compiled.is_spent):
            compiled = await self._compiled(key, structure, tokenizer, vocab_size, request_id, until_us)
        else:
            self._kept.move_to_end(key)
            self.found_total += 1
        if isinstance(compiled, str):
            raise InvalidRequest.field(structure.param, compiled, code="invalid_grammar")
        return [TokenConstraint(compiled, structure.param) for _ in range(count)]

    def close(self) -> None:
        """Compile no more; one that is being compiled ends by itself."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compiled(
        self,
        key: tuple[str, str],
        structure: Structure,
        tokenizer: Tokenizer,
        vocab_size: int,
        request_id: str,
        until_us: int | None,
    ) -> Compiled | str:
        pending = self._pending.get(key)
        if pending is None:
            if sum(len(each.waiters) for each in self._pending.values()) >= MOST_WAITING:
                raise EngineOverloaded(f"{MOST_WAITING} requests wait for their grammars to be compiled")
            pending = self._begin(key, structure, tokenizer, vocab_size)
        now_us = self._clock()
        pending.waiters[request_id] = now_us
        try:
            async with asyncio.timeout(None if until_us is None else max(0, until_us - now_us) / 1e6):
                return await asyncio.shield(pending.done)
        except TimeoutError as error:
            raise DeadlineMissed from error
        finally:
            pending.waiters.pop(request_id, None)
            # Whoever wanted it has left: one that nobody wants is not begun. One that was begun is kept all the same,
            # or callers that wait for less than it takes would have it compiled again and again.
            if not pending.waiters and pending.future.cancel():
                del self._pending[key]

    def _begin(self, key: tuple[str, str], structure: Structure, tokenizer: Tokenizer, vocab_size: int) -> _Pending:
        future = self._started().submit(self._compile, structure, tokenizer, vocab_size)
        pending = self._pending[key] = _Pending(future, asyncio.wrap_future(future))

        def ended(done: asyncio.Future[Compiled | str]) -> None:
            if done.cancelled():
                return
            del self._pending[key]
            if done.exception() is None:
                self._keep(key, done.result())

        pending.done.add_done_callback(ended)
        return pending

    def _keep(self, key: tuple[str, str], compiled: Compiled | str) -> None:
        self._kept[key] = compiled
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        if isinstance(compiled, str):
            self.refused_total += 1
        else:
            self.compiled_total += 1

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
            usual = threading.stack_size(_STACK_BYTES)
            try:
                self._thread.submit(int)  # the thread begins here, with this stack
            finally:
                threading.stack_size(usual)
        return self._thread

    # In the thread.

    def _compile(self, structure: Structure, tokenizer: Tokenizer, vocab_size: int) -> Compiled | str:
        """The grammar at its beginning, or why there is none."""
        if self._tokens is None:
            self._tokens = vocabulary(tokenizer, vocab_size)
        since_ns = time.thread_time_ns()
        try:
            tokens = self._tokens
            matcher = guarded(lambda: compile_grammar(tokens, structure))
            return matcher if isinstance(matcher, str) else Compiled(matcher)
        except ConstraintBroken as error:
            return str(error)
        finally:
            self.compile_us_total += (time.thread_time_ns() - since_ns) // 1000
