"""Grammars are compiled one after the other, each once, and what goes wrong there is one request's own."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine.scripted import make_request
from engine.tiny_model import tiny_tokenizer
from sluice_engine.core.constraint import ConstraintBroken
from sluice_engine.core.emissions import Emission
from sluice_engine.core.request import Outcome
from sluice_engine.errors import DeadlineMissed, InvalidRequest
from sluice_engine.protocol.structure import Structure
from sluice_engine.serving.output import ChoiceOutput
from sluice_engine.text import grammar_compiler as module
from sluice_engine.text.grammar_compiler import TokenConstraint
from sluice_engine.text.grammars import Grammars

TOKENIZER = tiny_tokenizer()


class PanicException(BaseException):
    """What the library ends in where it should not, by the name of Rust's own."""


class Compiler:
    """The library, held up where it turns what was written into its own words."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.begun = threading.Event(), threading.Event()
        self.seen: list[str] = []
        grammar = module._grammar

        def held(structure: Structure) -> str:
            self.seen.append(structure.source)
            self.begun.set()
            assert self.may_go_on.wait(30), "a test forgot to let it go on"
            if structure.source == "panic":
                raise PanicException("it never should have come to this")
            return grammar(structure)

        monkeypatch.setattr(module, "_grammar", held)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler(monkeypatch)
    yield compiler
    compiler.may_go_on.set()


async def wanted(grammars: Grammars, regex: str, who: str, until_us: int | None = None) -> list[TokenConstraint]:
    structure = Structure("regex", regex, "guided_regex")
    return await grammars.constraints(
        structure, TOKENIZER, TOKENIZER.vocab_size, request_id=who, count=1, until_us=until_us
    )


async def test_the_state_tells_who_waits_and_for_what(compiler: Compiler) -> None:
    grammars = Grammars(lambda: 0)
    tasks = [
        asyncio.create_task(wanted(grammars, "a+", "first")),
        asyncio.create_task(wanted(grammars, "a+", "second")),
    ]
    await asyncio.to_thread(compiler.begun.wait, 30)
    tasks.append(asyncio.create_task(wanted(grammars, "b+", "third")))
    await asyncio.sleep(0)

    assert {wait.id: wait.compiling for wait in grammars.state().waiting} == {
        "first": True,
        "second": True,
        "third": False,
    }

    compiler.may_go_on.set()
    await asyncio.gather(*tasks)
    await wanted(grammars, "a+", "fourth")
    state = grammars.state()
    assert (state.waiting, state.kept, state.compiled_total, state.found_total) == ((), 2, 2, 1)
    assert compiler.seen == ["a+", "b+"], "each once"
    grammars.close()


async def test_one_that_nobody_waits_for_any_more_is_not_begun(compiler: Compiler) -> None:
    grammars = Grammars(lambda: 0)
    first = asyncio.create_task(wanted(grammars, "a+", "first"))
    await asyncio.to_thread(compiler.begun.wait, 30)
    second = asyncio.create_task(wanted(grammars, "b+", "second"))
    await asyncio.sleep(0)

    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    anew = asyncio.create_task(wanted(grammars, "b+", "anew"))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineMissed):
        await wanted(grammars, "c+", "third", until_us=1)

    assert {wait.id for wait in grammars.state().waiting} == {"first", "anew"}
    compiler.may_go_on.set()
    await asyncio.gather(first, anew)
    assert compiler.seen == ["a+", "b+"]
    grammars.close()


async def test_one_that_was_begun_is_kept_though_nobody_waits_any_more(compiler: Compiler) -> None:
    grammars = Grammars(lambda: 0)
    first = asyncio.create_task(wanted(grammars, "a+", "first"))
    await asyncio.to_thread(compiler.begun.wait, 30)
    with pytest.raises(DeadlineMissed):
        await wanted(grammars, "a+", "second", until_us=1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert grammars.state().waiting == ()

    third = asyncio.create_task(wanted(grammars, "a+", "third"))
    await asyncio.sleep(0)
    assert [wait.id for wait in grammars.state().waiting] == ["third"]
    compiler.may_go_on.set()
    await third

    assert compiler.seen == ["a+"], "once, for all three"
    assert grammars.state().compiled_total == 1
    grammars.close()


@pytest.mark.parametrize(("regex", "says"), [("panic", "never should have"), ("(", "regex")])
async def test_what_does_not_compile_is_that_requests_and_its_time_counts(
    compiler: Compiler, regex: str, says: str
) -> None:
    grammars = Grammars(lambda: 0)
    compiler.may_go_on.set()

    with pytest.raises(InvalidRequest, match=says) as caught:
        await wanted(grammars, regex, "bad")

    assert caught.value.code == "invalid_grammar"
    assert grammars.state().refused_total == 1
    assert grammars.state().compile_us_total > 0
    assert len(await wanted(grammars, "a+", "good")) == 1, "the thread goes on"
    grammars.close()


# Lexers, rows and items of the parser each have a bound.
_ENDLESS = {
    "regex": Structure("regex", "(.*a.{200}){5}", "guided_regex"),
    "lark": Structure("grammar", 'start: "a" start', "structured_outputs.grammar"),
}


def drawn(constraint: TokenConstraint, most: int) -> None:
    """Draws so many tokens that the grammar allows."""
    dice, output = random.Random(7), list[int]()
    for position in range(most):
        mask = np.frombuffer(constraint.mask(position, output), dtype=np.uint8)
        output.append(int(dice.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")))))
        constraint.took(output[-1])


@pytest.mark.parametrize("kind", _ENDLESS)
async def test_a_grammar_that_grows_beyond_its_bounds_is_the_caller_s_and_spoils_no_other_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_LEXER_STATES", 300)  # the tiny model's tokens explore little
    grammars, structure = Grammars(lambda: 0), _ENDLESS[kind]

    async def one(who: str) -> TokenConstraint:
        (constraint,) = await grammars.constraints(
            structure, TOKENIZER, TOKENIZER.vocab_size, request_id=who, count=1, until_us=None
        )
        return constraint

    first = await one("first")
    with pytest.raises(ConstraintBroken):
        drawn(first, 2000)
    second = await one("second")

    assert any(second.mask(0, [])), "what the first explored is not the second's"
    assert grammars.state().compiled_total == 2
    request = make_request("A", 4, 4)
    request.constraint = first
    with pytest.raises(InvalidRequest, match=structure.param) as raised:
        ChoiceOutput(0, request, TOKENIZER, ()).push(Emission(request, outcome=Outcome.FAILED))
    assert (raised.value.status, raised.value.code) == (400, "invalid_grammar")
    grammars.close()
