"""One grammar: compiled, and followed by a request token by token. All that is known of the compiler, llguidance.

It knows no queue and no batch. Start reading at `compile_grammar`, then `TokenConstraint`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from sluice_engine.core.constraint import ConstraintBroken
from sluice_engine.protocol.structure import WHITESPACE, Structure
from sluice_engine.text.tokenizer import Tokenizer
from sluice_engine.text.tool_grammar import schemas_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# What is explored of regular expressions as tokens are drawn, a third of a kilobyte each. 64 KiB of random words in an
# enum have half as many, `(.*a.{200}){5}` has more than fit any memory. Up to here its masks take 3 ms; up to the
# library's own bound, 250,000, they took 40.
_MOST_LEXER_STATES = 30_000
_NOTHING_FITS = ("NoExtension", "NoExtensionBias")
# The compiler's messages repeat what was written, and draw it.
_MOST_SAID = 300


@dataclass(slots=True)
class Compiled:
    """A grammar at its beginning."""

    matcher: LLMatcher
    is_spent: bool = False
    """A request came to a bound of the compiler in it. All of its copies share what was explored of its regular
    expressions, and beyond a bound none of them goes on."""


class TokenConstraint:
    """One request's way through its grammar."""

    def __init__(self, compiled: Compiled, param: str = "") -> None:
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
            return guarded(call)
        except ConstraintBroken as error:
            raise self._end(str(error)) from error

    def _end(self, why: str) -> ConstraintBroken:
        self._compiled.is_spent = True
        self.broken = f"the answer could not go on after {self._taken} tokens: {why}"
        return ConstraintBroken(f"its grammar: {self.broken}")


def compile_grammar(tokens: LLTokenizer, structure: Structure) -> LLMatcher | str:
    """A grammar before its first token, or why there is none."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  # half of a second at its first use is nobody's start

    if structure.kind == "tools":
        # Each by itself first: so it can be said which one is wrong, and that something follows each.
        for what, schema in schemas_of(structure):
            problem = compile_grammar(tokens, Structure("json_schema", schema, structure.param))
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


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """A model's tokens as the compiler takes them; ids beyond the tokenizer's are no text."""
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

    spelled = TokenizerWrapper(_Spelled(tokenizer))
    return LLTokenizer(spelled, n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=sorted(tokenizer.eos_ids))


def guarded(call: Callable[[], T]) -> T:
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
