"""YAML as Kubernetes reads it: what JSON can hold, and nothing else.

Owns the notation: dates stay text, keys are texts and unique, and whatever could not be sent to an API server (or would
only fill the memory) is refused with its line. Knows nothing of manifests.
"""

from __future__ import annotations

import json
import math
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_DEEPEST = 100
# In a file, aliases counted as often as they are used: hundreds of services, and a second or two to read.
_MOST_NODES = 20_000
_LONGEST_NUMBER = 400
_LARGEST_INTEGER = 2**63


class InvalidYAML(Exception):
    """A text that is not YAML, or that JSON could not hold; one line that says where."""


def load_all(text: str) -> list[Any]:
    """The documents of a YAML stream, without those that are empty.

    Raises:
        InvalidYAML: with the line and the column.
    """
    try:
        return [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidYAML(f"is not YAML: {place}{_one_line(error.problem or error.context or '')}") from error
    except yaml.YAMLError as error:
        raise InvalidYAML(f"is not YAML: {_one_line(str(error))}") from error


class _Loader(yaml.SafeLoader):
    """Composes with bounds, and constructs JSON's types only."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._composed = 0
        # Node → how many nodes it stands for, and how deep they go; absent while it is being composed.
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node and all below it."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs
        mark: Any = event.start_mark
        self._depth += 1
        self._composed += 1
        if self._depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"is nested deeper than {_DEEPEST} levels", mark)
        if self._composed > _MOST_NODES:
            raise yaml.composer.ComposerError(None, None, f"holds more than {_MOST_NODES:,} values", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias stands for what it is in", mark)
            return node
        self._weigh(node, mark)
        return node

    def _weigh(self, node: yaml.Node, mark: Any) -> None:  # noqa: ANN401  # one of two classes
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [one for pair in node.value for one in pair]
            _require_unique_keys(node)
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        sizes = [self._sizes[child] for child in children]
        nodes, depth = 1 + sum(size for size, _ in sizes), 1 + max((deep for _, deep in sizes), default=0)
        if nodes > _MOST_NODES or depth > _DEEPEST:
            problem = f"holds more than {_MOST_NODES:,} values, or {_DEEPEST} levels of them"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        self._sizes[node] = nodes, depth

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  # PyYAML's
        """A mapping whose keys are texts, as in JSON."""
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if None in mapping:
            raise yaml.constructor.ConstructorError(None, None, "a key is null", node.start_mark)
        return {key if isinstance(key, str) else json.dumps(key): value for key, value in mapping.items()}

    def construct_number_or_truth(self, node: yaml.ScalarNode) -> Any:  # noqa: ANN401  # JSON
        """A number or a truth value that JSON can hold."""
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        if ":" in text and kind != "bool":
            return self.construct_text(node)  # to the base of 60 in YAML 1.1, text in Kubernetes
        constructors = {
            "int": self.construct_yaml_int,
            "float": self.construct_yaml_float,
            "bool": self.construct_yaml_bool,
        }
        shown = json.dumps(text if len(text) <= 40 else f"{text[:37]}...")
        try:
            value = constructors[kind](node) if len(text) <= _LONGEST_NUMBER else math.inf
        except (ValueError, LookupError) as error:
            problem = f"{shown} is not {_WORDS[kind]}: write it in quotes if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error
        if (kind == "int" and abs(value) >= _LARGEST_INTEGER) or (kind == "float" and not math.isfinite(value)):
            problem = f"{shown} is out of the range of numbers"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """A text that UTF-8 can hold."""
        text = str(self.construct_scalar(node))
        if any("\ud800" <= character <= "\udfff" for character in text):
            problem = "the text holds half a surrogate pair, which is no character"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return text


# "=" and what looks like a date have a type of their own in YAML 1.1; Kubernetes reads both as text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in {f"{_TAG}timestamp", f"{_TAG}value"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Only these: a set, a date or bytes would have no place in JSON.
_Loader.yaml_constructors = {
    f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
    f"{_TAG}int": _Loader.construct_number_or_truth,
    f"{_TAG}float": _Loader.construct_number_or_truth,
    f"{_TAG}bool": _Loader.construct_number_or_truth,
    f"{_TAG}str": _Loader.construct_text,
    f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
    None: yaml.SafeLoader.construct_undefined,
}


def _require_unique_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {json.dumps(key.value, ensure_ascii=False)} is set twice", key.start_mark
                )
            seen.add(key.value)


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 200 else f"{words[:197]}..."
