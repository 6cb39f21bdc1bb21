"""Reading manifests from files and checking them against the CRD, as `kubectl apply` would.

Owns finding the CRD that ships with this package, reading files, and what the API server itself asks of metadata and of
variables. Every refusal is one `InvalidManifest`. Knows nothing of YAML's notation (`plain_yaml.py`), nor of what the
fields mean (`spec.py`).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sluice_engine.errors import EngineError
from sluice_operator.errors import InvalidManifest, InvalidSpec
from sluice_operator.resource import plain_yaml, schema
from sluice_operator.resource.parsing import parse
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.resource.units import quantity_bytes

_CRD_NAME = "inferenceservices.sluice.dev.yaml"
_KIND = "InferenceService"
# Far above any manifest, and below what etcd stores: whatever is larger is some other file.
_LIMIT_BYTES = 1 << 20
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# Any printable ASCII but "=".
_VARIABLE = re.compile(r"[ -<>-~]+")


@functools.cache
def load_crd() -> dict[str, Any]:
    """The CRD: packaged with `sluice_operator` in a wheel, in `crds/` of the repository in an editable installation."""
    packaged = Path(__file__).parents[1] / "crds" / _CRD_NAME
    in_repository = Path(__file__).parents[4] / "crds" / _CRD_NAME
    path = packaged if packaged.is_file() else in_repository
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def read_file(path: str) -> list[dict[str, Any]]:
    """The InferenceServices in a file ("-": standard input), defaulted and checked.

    Raises:
        InvalidManifest: the file cannot be read, is not YAML, holds no InferenceService, or one breaks a rule.
    """
    return [check(document, path) for document in documents(path)]


def read_specs(path: str, *, namespace: str = "") -> list[ServiceSpec]:
    """The specs of a file's InferenceServices; `namespace` is where those are that name none.

    Raises:
        InvalidManifest: as for `read_file`, or a value cannot be understood.
    """
    return [read_spec(document, path, namespace=namespace) for document in documents(path)]


def documents(path: str) -> list[dict[str, Any]]:
    """The InferenceServices in a file as they are written.

    Raises:
        InvalidManifest: the file cannot be read, is not YAML, or holds no InferenceService.
    """
    try:
        found = plain_yaml.load_all(read_text(path))
    except plain_yaml.InvalidYAML as error:
        raise InvalidManifest(path, [str(error)]) from error
    services = [document for document in found if isinstance(document, dict) and document.get("kind") == _KIND]
    if not services:
        raise InvalidManifest(path, [f"holds no {_KIND}"])
    return services


def read_text(path: str) -> str:
    """The text of a file of modest size ("-": standard input).

    Raises:
        InvalidManifest: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        if path == "-":
            content = sys.stdin.buffer.read(_LIMIT_BYTES + 1) if sys.stdin else b""
        else:
            with Path(path).open("rb") as file:
                content = file.read(_LIMIT_BYTES + 1)
        if len(content) > _LIMIT_BYTES:
            raise InvalidManifest(path, ["is larger than 1 MiB, which no manifest is"])
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidManifest(path, [getattr(error, "strerror", None) or "is not UTF-8 text"]) from error


def read_spec(document: dict[str, Any], where: str, *, namespace: str = "") -> ServiceSpec:
    """The spec of one InferenceService.

    Raises:
        InvalidManifest: it breaks a rule, or a value cannot be understood.
    """
    body = check(document, where)
    try:
        return parse({**body, "metadata": {"namespace": namespace, **body["metadata"]}})
    except (InvalidSpec, EngineError) as error:
        raise InvalidManifest(_named(where, body["metadata"]), [str(error)]) from error


def check(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The manifest with the CRD's defaults.

    Raises:
        InvalidManifest: it breaks a rule; the texts are those of the API server.
    """
    api_version = str(document.get("apiVersion"))
    found = schema.version_schema(load_crd(), api_version)
    if found is None:
        problem = f'no matches for kind "{_KIND}" in version "{api_version}"'
        raise InvalidManifest(where, [f"{problem}: this release has {' and '.join(schema.api_versions(load_crd()))}"])
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or name is None:
        raise InvalidManifest(where, ["metadata.name: Required value"])
    if not isinstance(name, str):
        problem = f"metadata.name: Invalid value: {_short(name)}: must be a string: write it in quotes"
        raise InvalidManifest(where, [problem])
    # Null or empty, as templates write it, is a namespace that is not named.
    named = {key: value for key, value in metadata.items() if key != "namespace" or (value is not None and value != "")}
    wrong = list(_metadata_problems(named))
    defaulted: dict[str, Any] = schema.with_defaults(found, {**document, "metadata": named})
    broken = schema.problems(found, defaulted)
    wrong += broken or [*_variable_problems(defaulted), *_quantity_problems(defaulted)]
    if wrong:
        raise InvalidManifest(_named(where, metadata), wrong)
    return defaulted


def is_namespace(name: object) -> bool:
    """Whether a namespace can be named so: an RFC 1123 label."""
    return isinstance(name, str) and _NAMESPACE.fullmatch(name) is not None


def _named(where: str, metadata: dict[str, Any]) -> str:
    return f"{where}: {_KIND} {_short(metadata['name'])}"


def _metadata_problems(metadata: dict[str, Any]) -> Iterator[str]:
    if "namespace" in metadata and not is_namespace(metadata["namespace"]):
        yield (
            f"metadata.namespace: Invalid value: {_short(metadata['namespace'])}: must be at most 63 lower case "
            "letters, digits and '-', with a letter or digit at both ends"
        )
    for field in ("labels", "annotations"):
        found = metadata.get(field) or {}
        for key, value in found.items() if isinstance(found, dict) else ((None, None),):
            if not isinstance(value, str):
                place = f"metadata.{field}" + ("" if key is None else f"[{_short(key)}]")
                words = "a map of strings" if key is None else "a string: write it in quotes"
                yield f"{place}: Invalid value: {_short(found if key is None else value)}: must be {words}"
    for field, kind, words in (("uid", str, "a string"), ("generation", int, "an integer")):
        if not isinstance(metadata.get(field, kind()), kind):
            yield f"metadata.{field}: Invalid value: {_short(metadata[field])}: must be {words}"


def _variable_problems(body: dict[str, Any]) -> Iterator[str]:
    """What is wrong with variables as such: the pods, or the process, would be refused with them."""
    for index, variable in enumerate(body["spec"]["podTemplate"]["engine"].get("env", ())):
        field, value = f"spec.podTemplate.engine.env[{index}]", variable.get("value", "")
        if not _VARIABLE.fullmatch(variable["name"]):
            name = _short(variable["name"])
            yield f"{field}.name: Invalid value: {name}: must be printable ASCII characters other than '='"
        if not isinstance(value, str):
            yield f"{field}.value: Invalid value: {_short(value)}: must be a string: write it in quotes"
        elif "\0" in value:
            yield f"{field}.value: Invalid value: {_short(value)}: must not hold a NUL character"


def _quantity_problems(body: dict[str, Any]) -> Iterator[str]:
    """Quantities that the pods would be refused with: the schema takes any text, since a rule on each is too dear."""
    for kind in ("requests", "limits"):
        for name, value in body["spec"]["resources"].get(kind, {}).items():
            if quantity_bytes(str(value)) is None:
                field = f"spec.resources.{kind}.{name}"
                yield f"{field}: Invalid value: {_short(value)}: must be a quantity: write for example 500m, 2 or 8Gi"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
