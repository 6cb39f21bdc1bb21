"""The part of the Common Expression Language that the CRD's rules use, to check them without an API server.

Owns parsing and evaluating one expression over plain JSON values. Knows nothing of schemas: `schema.py` says which rule
is evaluated on which value. Supported: literals, `.field`, `has()`, `all` and `exists`, `==` and the like, `&&`, `||`,
`!`, `+ - * /`, and the functions in `_METHODS` and `_FUNCTIONS`. Source: the language definition at cel.dev.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator.resource.units import parse_duration_us

Node = Callable[[Mapping[str, Any]], Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<symbol>\|\||&&|[=!<>]=|[-+*/<>!().,]))"
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


class CelError(Exception):
    """An expression that does not parse, or that fails on this value (a field that is absent, unequal types)."""


@dataclass(frozen=True, order=True)
class Duration:
    """A length of time."""

    microseconds: int


_METHODS: dict[str, Callable[..., Any]] = {
    "size": len,
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
    "startsWith": lambda text, prefix: text.startswith(prefix),
    "getMilliseconds": lambda duration: duration.microseconds // 1000,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "duration": lambda text: Duration(parse_duration_us(text, "duration")),
    "size": len,
    "type": type,
}
_TYPES: dict[str, type] = {"int": int, "string": str}


@functools.cache
def compile_rule(source: str) -> Node:
    """A function from variables (`self`, `oldSelf`) to the rule's value.

    Raises:
        CelError: the source is outside the supported part of the language.
    """
    return _Parser(source).parse()


class _Parser:
    """Recursive descent, lowest precedence first."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens: list[tuple[str, str]] = []
        self.position = 0
        offset, end = 0, len(source.rstrip())
        while offset < end:
            match = _TOKEN.match(source, offset)
            if match is None:
                raise CelError(f"unexpected {source[offset:].strip()[:20]!r} in {source!r}")
            self.tokens.append((match.lastgroup or "", match.group(match.lastgroup or 0)))
            offset = match.end()
        self.tokens.append(("end", ""))

    def parse(self) -> Node:
        node = self.either()
        self.expect("")
        return node

    def take(self, *symbols: str) -> str | None:
        kind, text = self.tokens[self.position]
        if kind == "symbol" and text in symbols:
            self.position += 1
            return text
        return None

    def expect(self, text: str) -> None:
        if self.tokens[self.position][1] != text:
            raise CelError(
                f"expected {text or 'the end'!r}, found {self.tokens[self.position][1]!r} in {self.source!r}"
            )
        self.position += 1

    def name(self) -> str:
        kind, text = self.tokens[self.position]
        if kind != "name":
            raise CelError(f"expected a name, found {text!r} in {self.source!r}")
        self.position += 1
        return text

    def either(self) -> Node:
        node = self.both()
        while self.take("||"):
            node = _logic(node, self.both(), decisive=True)
        return node

    def both(self) -> Node:
        node = self.comparison()
        while self.take("&&"):
            node = _logic(node, self.comparison(), decisive=False)
        return node

    def comparison(self) -> Node:
        left = self.sum()
        if symbol := self.take(*_COMPARE):
            compare, right = _COMPARE[symbol], self.sum()
            return lambda names: _guarded(compare, left(names), right(names))
        return left

    def sum(self) -> Node:
        node = self.product()
        while symbol := self.take("+", "-"):
            node = _arithmetic(operator.add if symbol == "+" else operator.sub, node, self.product())
        return node

    def product(self) -> Node:
        node = self.unary()
        while symbol := self.take("*", "/"):
            node = _arithmetic(operator.mul if symbol == "*" else _divide, node, self.unary())
        return node

    def unary(self) -> Node:
        if self.take("!"):
            inner = self.unary()
            return lambda names: not _boolean(inner(names))
        return self.postfix(self.primary())

    def primary(self) -> Node:
        kind, text = self.tokens[self.position]
        if self.take("("):
            node = self.either()
            self.expect(")")
            return node
        self.position += 1
        if kind in {"number", "string"} or text in {"true", "false"}:
            value = _literal(kind, text)
            return lambda _: value
        if kind != "name":
            raise CelError(f"unexpected {text!r} in {self.source!r}")
        if self.take("("):
            return self.call(text)
        if (kind_of_value := _TYPES.get(text)) is not None:
            return lambda _: kind_of_value
        return lambda names: _select(names, text)

    def call(self, name: str) -> Node:
        argument = self.either()
        self.expect(")")
        if name == "has":
            return lambda names: _present(argument, names)
        function = _FUNCTIONS.get(name)
        if function is None:
            raise CelError(f"unknown function {name!r} in {self.source!r}")
        return lambda names: _guarded(function, argument(names))

    def postfix(self, node: Node) -> Node:
        while self.take("."):
            name = self.name()
            node = self.method(node, name) if self.take("(") else _field(node, name)
        return node

    def method(self, target: Node, name: str) -> Node:
        if name in {"all", "exists"}:
            quantifier = all if name == "all" else any
            variable = self.name()
            self.expect(",")
            body = self.either()
            self.expect(")")
            return lambda names: quantifier(_boolean(body({**names, variable: item})) for item in target(names))
        method = _METHODS.get(name)
        if method is None:
            raise CelError(f"unknown function {name!r} in {self.source!r}")
        if self.take(")"):
            return lambda names: _guarded(method, target(names))
        argument = self.either()
        self.expect(")")
        return lambda names: _guarded(method, target(names), argument(names))


def _literal(kind: str, text: str) -> int | str | bool:
    if kind == "number":
        return int(text)
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if kind == "string" else text == "true"


def _field(node: Node, name: str) -> Node:
    return lambda names: _select(node(names), name)


def _select(value: Any, name: str) -> Any:  # noqa: ANN401  # JSON has no narrower type
    if not isinstance(value, Mapping) or name not in value:
        raise CelError(f"no such key: {name}")
    return value[name]


def _present(node: Node, names: Mapping[str, Any]) -> bool:
    # Inside has() only the last selection may fail; an absent parent is an error in the language as well, but every
    # optional parent of our schema has a default, so the difference cannot be seen.
    try:
        node(names)
    except CelError:
        return False
    return True


def _logic(left: Node, right: Node, *, decisive: bool) -> Node:
    """`||` and `&&`: a decisive side settles the matter even where the other one fails."""

    def evaluate(names: Mapping[str, Any]) -> bool:
        try:
            if _boolean(left(names)) is decisive:
                return decisive
        except CelError:
            if _boolean(right(names)) is decisive:
                return decisive
            raise
        return _boolean(right(names))

    return evaluate


def _arithmetic(apply: Callable[[Any, Any], Any], left: Node, right: Node) -> Node:
    return lambda names: _guarded(apply, left(names), right(names))


def _divide(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _boolean(value: Any) -> bool:  # noqa: ANN401  # JSON has no narrower type
    if not isinstance(value, bool):
        raise CelError("no such overload")
    return value


def _guarded(apply: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  # JSON has no narrower type
    try:
        return apply(*arguments)
    except CelError:
        raise
    except Exception as error:
        raise CelError(f"no such overload: {error}") from error
