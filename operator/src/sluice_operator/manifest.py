"""Reading manifests from files and checking them against the CRD, as `kubectl apply` would.

Owns finding the CRD that ships with this package and reading YAML. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import yaml

from sluice_operator import schema
from sluice_operator.errors import InvalidManifest

_CRD_NAME = "inferenceservices.sluice.dev.yaml"


@functools.cache
def load_crd() -> dict[str, Any]:
    """The CRD: packaged beside this file in a wheel, in `crds/` of the repository in an editable installation."""
    packaged = Path(__file__).with_name("crds") / _CRD_NAME
    in_repository = Path(__file__).parents[3] / "crds" / _CRD_NAME
    path = packaged if packaged.is_file() else in_repository
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def read_file(path: str) -> list[dict[str, Any]]:
    """The InferenceServices in a file ("-": standard input), defaulted and checked.

    Raises:
        InvalidManifest: the file cannot be read, is not YAML, holds no InferenceService, or one breaks a rule.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidManifest(path, [getattr(error, "strerror", None) or "is not UTF-8 text"]) from error
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise InvalidManifest(path, [f"is not YAML: {' '.join(str(error).split())}"]) from error
    services = [document for document in documents if isinstance(document, dict) and document.get("kind") == _KIND]
    if not services:
        raise InvalidManifest(path, [f"holds no {_KIND}"])
    return [check(document, path) for document in services]


_KIND = "InferenceService"


def check(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The manifest with the CRD's defaults.

    Raises:
        InvalidManifest: it breaks a rule; the texts are those of the API server.
    """
    api_version = str(document.get("apiVersion"))
    found = schema.version_schema(load_crd(), api_version)
    if found is None:
        raise InvalidManifest(where, [f'no matches for kind "{_KIND}" in version "{api_version}"'])
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise InvalidManifest(where, ["metadata.name: Required value"])
    defaulted: dict[str, Any] = schema.with_defaults(found, document)
    if wrong := schema.problems(found, defaulted):
        raise InvalidManifest(f"{where}: {_KIND} {metadata['name']!r}", wrong)
    return defaulted
