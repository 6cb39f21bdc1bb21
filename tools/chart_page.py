"""The chart's README: every value with its type, default and meaning.

Reads values.yaml with its comments, since they are the documentation, and the types from values.schema.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from page import code, flat, table

Schema = dict[str, Any]


def chart_page(chart: dict[str, Any], values: str, schema: Schema) -> str:
    """The chart's README: how to install it, and every value with type, default and meaning."""
    rows = [
        (f"`{path}`", _type_of(_at(schema, path), schema), code(default), flat(meaning))
        for path, default, meaning in documented_values(values)
    ]
    return f"""\
# Helm chart: {chart["name"]} {chart["version"]}

<!-- Written by tools/generate.py from values.yaml and values.schema.json: change those, then `make crds`. -->

{chart["description"]}. Needs Kubernetes {chart["kubeVersion"].removesuffix("-0")} and Helm 3.14 or later.

```sh
helm install sluice charts/sluice --namespace sluice-system --create-namespace \\
  --set images.registry=registry.example.com/sluice
```

`images.registry` is where you pushed the images that are built from `operator/Dockerfile`, `sidecar/Dockerfile` and
`engine_image/Dockerfile`.

The notes that Helm prints then say the next command. The chart installs the operator, its least-privilege roles, the
CustomResourceDefinition `inferenceservices.sluice.dev` and aggregated roles for users. `helm upgrade` upgrades the
definition too; `helm uninstall` keeps it, and with it every InferenceService and its pods:
`kubectl delete customresourcedefinition inferenceservices.sluice.dev` removes those.

With `watchNamespaces` the operator gets a Role in each of those namespaces (they must exist) and no ClusterRole. What
is cluster-wide then can be left to an administrator: `crds.install=false` and `rbac.aggregate=false`.

A definition that an earlier release kept belongs to that release's name and namespace. Another release adopts it with
`helm install --take-ownership` (Helm 3.17 or later), or leaves it alone with `crds.install=false`.

`helm test sluice --namespace sluice-system` starts a pod that reads whether the definition is served and the operator
ready, by rights that every account has. Alerts, recording rules, a ServiceMonitor and Grafana dashboards are under
`monitoring` ([docs/monitoring.md](../../docs/monitoring.md)); where Prometheus Operator is absent they are left out,
and the notes say so. Without a network: [docs/air-gapped.md](../../docs/air-gapped.md).

## Values

An unknown value, or one of the wrong type, is refused with its name.

{table(("value", "type", "default", "meaning"), rows)}
"""


def documented_values(text: str) -> Iterator[tuple[str, Any, str]]:
    """Dotted path, default and comment of every value; one without a comment has that of the line above."""
    lines = text.splitlines()
    meaning = ""

    def comment_above(key: yaml.Node) -> str:
        start = end = key.start_mark.line
        while start > 0 and lines[start - 1].strip().startswith("#"):
            start -= 1
        return " ".join(line.strip().removeprefix("# ") for line in lines[start:end])

    def walk(node: yaml.MappingNode, tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, str]]:
        nonlocal meaning
        for key, value in node.value:
            meaning = comment_above(key) or meaning
            path, default = prefix + key.value, tree[key.value]
            # A mapping whose keys carry no comments of their own is one value, such as Kubernetes' own types.
            below = [inner for inner, _ in value.value] if isinstance(value, yaml.MappingNode) else []
            if any(comment_above(inner) for inner in below if inner.start_mark.line > key.start_mark.line):
                yield from walk(value, default, path + ".")
            else:
                yield path, default, meaning

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "values.yaml holds one mapping"
    yield from walk(root, yaml.safe_load(text), "")


def _at(root: Schema, path: str) -> Schema:
    """The schema of a value."""
    schema = root
    for name in path.split("."):
        schema = _resolve(_resolve(schema, root)["properties"][name], root)
    return schema


def _resolve(schema: Schema, root: Schema) -> Schema:
    """The schema itself, or the definition it points to."""
    if "$ref" not in schema:
        return schema
    definition: Schema = root["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
    return definition


def _type_of(schema: Schema, root: Schema) -> str:
    """A type in a reader's words."""
    schema = _resolve(schema, root)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return f"list of {_type_of(schema['items'], root)}"
    names = {"object": "map", "string": "text", "boolean": "true or false"}
    return " or ".join(names.get(str(one), str(one)) for one in (kind if isinstance(kind, list) else [kind]))
