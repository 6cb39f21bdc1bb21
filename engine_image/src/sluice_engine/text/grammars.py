"""Grammars compiled in a thread of their own: a request waits for its grammar here, and delays nobody but its like.

Owns the compiler (llguidance), what it has compiled, and the queue of those who wait. Its methods belong to the event
loop. It knows no batch: what it hands out limits one request's tokens, in the thread that samples. Start reading at
`Grammars.constraints`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from sluice_engine.core.constraint import ConstraintBroken
from sluice_engine.core.state import GrammarState, GrammarWait
from sluice_engine.errors import DeadlineMissed, EngineOverloaded, InvalidRequest
from sluice_engine.protocol.structure import WHITESPACE, Structure
from sluice_engine.text.tokenizer import Tokenizer
from sluice_engine.text.tool_grammar import schemas_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# The compiler recurses: one definition of a schema that leads to the next takes some 100 KB, and 64 KiB of schema hold
# 2,000 of them. Of a stack only what was touched is memory.
_STACK_BYTES = 512 * 2**20
# With what its requests have explored, one takes some ten megabytes at worst.
MOST_KEPT = 32
# What is explored of regular expressions as tokens are drawn, a third of a kilobyte each. 64 KiB of random words in an
# enum have half as many, `(.*a.{200}){5}` has more than fit any memory. Up to here its masks take 3 ms; up to the
# library's own bound, 250,000, they took 40.
_MOST_LEXER_STATES = 30_000
# Each is compiled in milliseconds, at worst in half a second; four tools with 64 KiB of schema each took 1.5 s.
MOST_WAITING = 64
_NOTHING_FITS = ("NoExtension", "NoExtensionBias")
# The compiler's messages repeat what was written, and draw it.
_MOST_SAID = 300


@dataclass(slots=True)
class _Pending:
    """A grammar that is being compiled, or waits for that."""

    future: Future[_Compiled | str]
    done: asyncio.Future[_Compiled | str]
    """The same, for the event loop."""
    waiters: dict[str, int] = field(default_factory=dict)
    """Requests, and since when they wait."""


@dataclass(slots=True)
class _Compiled:
    """A grammar at its beginning."""

    matcher: LLMatcher
    is_spent: bool = False
    """A request came to a bound of the compiler in it. All of its copies share what was explored of its regular
    expressions, and beyond a bound none of them goes on."""


class TokenConstraint:
    """One request's way through its grammar."""

    def __init__(self, compiled: _Compiled, param: str = "") -> None:
        """`param`: the field that the grammar stood in."""
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._taken = 0
        self.param = param
        self.broken = ""
        """Why the grammar could not go on, where that is the grammar's own doing."""

    def mask(self, position: int, output: Sequence[int]) -> bytes:
        """See `Constraint`."""
        if self._taken > position:
            self._matcher.reset()
            self._taken = 0
        for token_id in output[self._taken : position]:
            self.took(token_id)
        if self._taken != position:
            raise ConstraintBroken("a token was sampled that its grammar was not told of")
        mask = self._asked(self._matcher.compute_bitmask)
        if self._matcher.is_error() or not any(mask):
            raise self._end(_said(self._matcher.get_error()) or "no token fits")
        return mask

    def took(self, token_id: int) -> None:
        """See `Constraint`."""
        if not self._asked(lambda: self._matcher.consume_token(token_id)):
            raise self._end(_said(self._matcher.get_error()) or f"it does not take the token {token_id}")
        self._taken += 1

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return _guarded(call)
        except ConstraintBroken as error:
            raise self._end(str(error)) from error

    def _end(self, why: str) -> ConstraintBroken:
        self._compiled.is_spent = True
        self.broken = f"the answer could not go on after {self._taken} tokens: {why}"
        return ConstraintBroken(f"its grammar: {self.broken}")


class Grammars:
    """The compiled grammars of one model, and who waits for one."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock`: monotonic µs."""
        self._clock = clock
        self._thread: ThreadPoolExecutor | None = None
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], _Compiled | str] = OrderedDict()
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
        if compiled is None or (isinstance(compiled, _Compiled) and compiled.is_spent):
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
    ) -> _Compiled | str:
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

        def ended(done: asyncio.Future[_Compiled | str]) -> None:
            if done.cancelled():
                return
            del self._pending[key]
            if done.exception() is None:
                self._keep(key, done.result())

        pending.done.add_done_callback(ended)
        return pending

    def _keep(self, key: tuple[str, str], compiled: _Compiled | str) -> None:
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

    def _compile(self, structure: Structure, tokenizer: Tokenizer, vocab_size: int) -> _Compiled | str:
        """The grammar at its beginning, or why there is none."""
        if self._tokens is None:
            self._tokens = _tokens(tokenizer, vocab_size)
        since_ns = time.thread_time_ns()
        try:
            tokens = self._tokens
            begun = _guarded(lambda: _begun(tokens, structure))
            return begun if isinstance(begun, str) else _Compiled(begun)
        except ConstraintBroken as error:
            return str(error)
        finally:
            self.compile_us_total += (time.thread_time_ns() - since_ns) // 1000


def _begun(tokens: LLTokenizer, structure: Structure) -> LLMatcher | str:
    """A grammar before its first token, or why there is none."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  # half of a second at its first use is nobody's start

    if structure.kind == "tools":
        # Each by itself first: so it can be said which one is wrong, and that something follows each.
        for what, schema in schemas_of(structure):
            problem = _begun(tokens, Structure("json_schema", schema, structure.param))
            if isinstance(problem, str):
                return f"{what}: {problem}"
    limits = LLParserLimits(max_lexer_states=_MOST_LEXER_STATES)
    matcher = LLMatcher(tokens, _grammar(structure), log_level=0, limits=limits)
    if not matcher.is_error():
        # A grammar may be sound and have no first token: nothing follows it, and nobody needs to run to find out.
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            matcher = first
    return _said(matcher.get_error()) or "nothing can follow it" if matcher.is_error() else matcher


def _grammar(structure: Structure) -> str:
    """In the compiler's own words."""
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415

    if structure.kind == "json_schema":
        options = {"whitespace_pattern": WHITESPACE}
        grammar: str = LLMatcher.grammar_from_json_schema(structure.source, overrides=options)  # type: ignore[arg-type]
        return grammar
    if structure.kind == "tools":
        return LLMatcher.grammar_from_lark(structure.source)
    if structure.kind == "choice":
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text) for text in json.loads(structure.source))
        )
    return grammar_from(structure.kind, structure.source)


class _Spelled:
    """A tokenizer in the form that the compiler takes: every token's bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.token_bytes
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        # What stands for no text is never part of a grammar's text: it is named, and marked as special.
        self.special_token_ids = [token_id for token_id, added in enumerate(table) if not added]
        self.tokens = [added or tokenizer.shown(token_id)[0].encode() for token_id, added in enumerate(table)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special=False)


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

    spelled = TokenizerWrapper(_Spelled(tokenizer))
    return LLTokenizer(spelled, n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=sorted(tokenizer.eos_ids))


def _guarded(call: Callable[[], T]) -> T:
    """What a call of the library gives; a panic of its own is that request's end, and not the thread's.

    Raises:
        ConstraintBroken: it panicked.
    """
    try:
        return call()
    except Exception as error:
        raise ConstraintBroken(_said(str(error) or type(error).__name__)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Rust's panics are no `Exception`, and have no name to import
            raise
        raise ConstraintBroken(_said(str(error))) from error


def _said(message: str) -> str:
    """What the compiler says, in one line and without its own state."""
    text = " ".join(message.partition("<state>")[0].split())
    if text in _NOTHING_FITS:
        return "nothing can follow it"
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}…"
