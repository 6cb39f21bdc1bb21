"""A model's chat template: messages in, prompt text out.

Templates come with the model and are programs in Jinja, so they run in a sandbox without attribute writes, and within
bounds of time and size: each turn of a loop and each call of a macro looks at the clock. The names that templates
expect (`raise_exception`, `strftime_now`, `tojson`, the `generation` tag) are those of Hugging Face.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice_engine.errors import InvalidRequest, ModelUnavailable

# A prompt longer than this fits no model served here: 4 bytes a token make 16 million tokens.
MAX_PROMPT_CHARACTERS = 64 * 2**20
# Of a whole number: Python multiplies far longer ones for ever, and holds all other threads meanwhile.
MAX_NUMBER_BITS = 4096
# Linear in the messages, a template ends within milliseconds; the rest is a template that multiplies its input.
MAX_RENDER_S = 5.0
_TICK = "_sluice_tick"


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose programs come to an end: `_TICK` is called in every turn of a loop and in every macro."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno).set_environment(self))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401  # any values
        """As the sandbox does, but for sums, products and powers beyond all bounds."""
        if operator == "**" and not max(1, _bits(left)) * abs(right) <= MAX_NUMBER_BITS:
            raise _TooMuch
        if operator == "*" and _bits(left) + _bits(right) > MAX_NUMBER_BITS:
            raise _TooMuch
        if operator == "*" and (size := _repeated(left, right) or _repeated(right, left)) > MAX_PROMPT_CHARACTERS:
            raise _TooMuch(size)
        if operator == "+" and isinstance(left, str | list) and len(left) > MAX_PROMPT_CHARACTERS:
            raise _TooMuch
        return super().call_binop(context, operator, left, right)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _repeated(value: object, times: object) -> int:
    return len(value) * times if isinstance(value, str | list | tuple) and isinstance(times, int) else 0


class _TooMuch(Exception):
    """A template goes on beyond all bounds."""


class ChatTemplate:
    """One compiled template and the special tokens that it names."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile.

        Raises:
            ModelUnavailable: the template is not Jinja.
        """
        environment = _BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnavailable(f"the model's chat template does not compile: {error}", "ModelCorrupt") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        clock: Callable[[], float],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The prompt text that ends where the assistant's turn begins. `clock` counts seconds.

        The sandbox caps `range`; size and time are checked at each piece of output, and time in each turn of a loop.

        Raises:
            InvalidRequest: the template refuses these messages, or they make too much of it.
        """
        deadline = clock() + MAX_RENDER_S
        pieces: list[str] = []
        size = 0

        def tick() -> str:
            if clock() > deadline:
                raise _TooMuch
            return ""

        told = {"messages": list(messages), "tools": None if tools is None else list(tools), "documents": None}
        context = {**self._special_tokens, **told, _TICK: tick}
        try:
            for piece in self._template.generate(**context, add_generation_prompt=True):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_PROMPT_CHARACTERS or clock() > deadline:
                    break
            else:
                return "".join(pieces)
        except _TooMuch:
            pass
        except Exception as error:  # a template is a program: whatever it raises, these messages caused it
            raise _refused(str(error) or type(error).__name__) from error
        raise _refused("they make a prompt beyond all bounds")


def _refused(problem: str) -> InvalidRequest:
    message = f"messages: the model's chat template refuses them: {' '.join(problem.split())[:500]}"
    return InvalidRequest(message, param="messages", code="chat_template_error")


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # Jinja reads this name

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(  # the signature that templates know
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # Jinja's own filter escapes for HTML, which a model has not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
