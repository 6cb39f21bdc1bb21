"""The reference of the InferenceService: every field with type, default, bounds, meaning and cross-checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from page import code, flat, pattern, table

Schema = dict[str, Any]


def crd_page(crd: dict[str, Any]) -> str:
    """Every field of the resource with type, default, bounds, meaning and cross-checks."""
    version = crd["spec"]["versions"][0]
    names = crd["spec"]["names"]
    schema = version["schema"]["openAPIV3Schema"]
    group = f"{crd['spec']['group']}/{version['name']}"
    parts = [
        f"# {names['kind']} ({group})",
        "<!-- Written by tools/generate.py from the CRD in crds/: change that, then `make crds`. -->",
        f"""\
`kubectl get {crd["metadata"]["name"]}`, or `kubectl get {names["shortNames"][0]}` for short; `kubectl explain
{names["plural"]}.spec --recursive` says the same in a terminal. Examples are in [crds/examples](../crds/examples). An
unknown field is refused.

[crds/inferenceservice.schema.json](../crds/inferenceservice.schema.json) is the same for editors. With the YAML
language server (VS Code, Neovim, …) it gives completion and red lines once this comment stands at the top of a
manifest, with the path or URL of the file:

```yaml
# yaml-language-server: $schema=../inferenceservice.schema.json
```

Cross-checks are not in it: `sluice check FILE` and the API server tell those.""",
    ]
    if schema.get("description"):
        parts.append(flat(schema["description"]))
    for top in ("spec", "status"):
        parts += [f"## {top}", *_tables(schema["properties"][top], top)]
    parts += ["## Checks", CHECKS, table(("where", "refused with"), _rules(schema, ""))]
    columns = [
        (
            column["name"],
            column["type"],
            f"`{flat(column['jsonPath'])}`",
            "wide" if column.get("priority") else "always",
            flat(column.get("description", "")),
        )
        for column in version.get("additionalPrinterColumns", [])
    ]
    parts += ["## Columns of `kubectl get`", table(("column", "type", "from", "shown", "meaning"), columns)]
    scale = version.get("subresources", {}).get("scale")
    if scale:
        parts += [
            "## Scale",
            f"""\
`kubectl scale` and autoscalers set `{scale["specReplicasPath"].lstrip(".")}`, and read
`{scale["statusReplicasPath"].lstrip(".")}` and `{scale["labelSelectorPath"].lstrip(".")}`.""",
        ]
    return "\n\n".join(parts) + "\n"


CHECKS = """\
Beyond types and bounds, the API server refuses a manifest that breaks one of these rules, with this message. A rule on
`status.stepCost` binds only once pods have measured their own step times."""


def _tables(schema: Schema, path: str) -> Iterator[str]:
    """One table of fields for an object, then one for each object in it."""
    if schema.get("description"):
        yield flat(schema["description"])
    required = schema.get("required", [])
    inner: list[tuple[str, Schema]] = []
    rows = []
    for name, field in schema.get("properties", {}).items():
        item, suffix = _innermost(field)
        if item.get("properties"):
            inner.append((f"{path}.{name}{suffix}", item))
        bounds = _bounds(field) or _bounds(item)
        default = code(field["default"]) if "default" in field else "required" if name in required else ""
        link = f"`{name}`"
        rows.append((link, _field_type(field), default, bounds, flat(field.get("description", ""))))
    if rows:
        yield table(("field", "type", "default", "bounds", "meaning"), rows)
    for inner_path, item in inner:
        yield f"### {inner_path}"
        yield from _tables({key: value for key, value in item.items() if key != "description"}, inner_path)


def _innermost(field: Schema) -> tuple[Schema, str]:
    """The schema of a list's or map's elements, else of the field itself, and how a path into it is written."""
    if "items" in field:
        return field["items"], "[]"
    if isinstance(field.get("additionalProperties"), dict):
        return field["additionalProperties"], "{}"
    return field, ""


def _field_type(field: Schema) -> str:
    """A field's type in a reader's words."""
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if "items" in field:
        return f"list of {_field_type(field['items'])}"
    if isinstance(field.get("additionalProperties"), dict):
        return f"map of {_field_type(field['additionalProperties'])}"
    if field.get("x-kubernetes-preserve-unknown-fields"):
        return "object (Kubernetes' own)"
    return str(field.get("format", field.get("type", "any")))


def _bounds(field: Schema) -> str:
    """Limits of a field's value."""
    if "enum" in field:
        return ""
    found = []
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        found.append(f"{low:,} to {high:,}")
    elif low is not None:
        found.append(f"at least {low:,}")
    elif high is not None:
        found.append(f"at most {high:,}")
    if text := pattern(field):
        found.append(f"`{flat(text)}`")
    for key, words in (
        ("minLength", "at least {} characters"),
        ("maxLength", "at most {} characters"),
        ("minItems", "at least {} items"),
        ("maxItems", "at most {} items"),
        ("minProperties", "at least {} entries"),
        ("maxProperties", "at most {} entries"),
    ):
        if key in field:
            found.append(words.format(f"{field[key]:,}"))
    return "; ".join(found)


def _rules(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    """Where each CEL rule stands, and its message."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield f"`{path or 'the whole resource'}`" if path else "the whole resource", flat(rule["message"])
    for name, field in schema.get("properties", {}).items():
        item, suffix = _innermost(field)
        inner = f"{path}.{name}".lstrip(".")
        if suffix:
            for rule in field.get("x-kubernetes-validations", []):
                yield f"`{inner}`", flat(rule["message"])
        yield from _rules(item, inner + suffix)
