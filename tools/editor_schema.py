"""The resource as a JSON Schema for editors: completion, descriptions and red lines while a manifest is written.

Owns the translation from the structural schema of the CRD. Cross-checks (CEL) are not in it: the API server and
`sluice check` tell them.
"""

from __future__ import annotations

import json
from typing import Any

from page import pattern

Schema = dict[str, Any]

_KEPT = (
    "type", "description", "default", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "maxProperties", "required", "format", "anyOf",
)  # fmt: skip
# What the API server's own type of metadata takes is long; what our rule on the name says is short.
NAME = {"type": "string", "maxLength": 50, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}


def editor_schema(crd: dict[str, Any]) -> str:
    """The schema as a JSON document; `status` is left out, since nobody writes it."""
    version = crd["spec"]["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    names = crd["spec"]["names"]
    metadata = root["properties"]["metadata"]["properties"]
    document = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": names["kind"],
        "description": root["description"],
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", *root["required"]],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": f"{crd['spec']['group']}/{version['name']}"},
            "kind": {"const": names["kind"]},
            "metadata": {
                "type": "object",
                "properties": {"name": {**NAME, "description": metadata["name"]["description"]}},
            },
            "spec": _translated(root["properties"]["spec"]),
        },
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _translated(node: Schema) -> Schema:
    result = {key: node[key] for key in _KEPT if key in node}
    if text := pattern(node):
        result["pattern"] = text
    if "properties" in node:
        result["properties"] = {name: _translated(child) for name, child in node["properties"].items()}
    if "items" in node:
        result["items"] = _translated(node["items"])
    if node.get("x-kubernetes-list-type") == "set":
        result["uniqueItems"] = True
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = _translated(node["additionalProperties"])
    elif node.get("type") == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
        # As strict decoding has it.
        result["additionalProperties"] = False
    return result
