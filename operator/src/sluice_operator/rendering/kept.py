"""The renderings that pods were started with, kept so that an upgrade of the operator restarts none.

Owns the ControllerRevisions of a service: what one holds, which of them its pods are to run by, and which keys of
`live.json` its programs know. A field of the spec calls for a new one exactly where somebody set it, and it changes the
pod's template or its configuration, both rendered by today's code: other defaults, images and keys are the operator's
own affair. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_engine import codec
from sluice_engine.live_config import LiveConfig
from sluice_operator.errors import InvalidSpec
from sluice_operator.plan import Key, Observed, is_owned, key
from sluice_operator.rendering.labels import GENERATION_ANNOTATION, RENDERING_ANNOTATION
from sluice_operator.rendering.ownership import metadata
from sluice_operator.rendering.pod_template import Object
from sluice_operator.resource.spec import ServiceSpec

KIND = "ControllerRevision"
UNKNOWN = "unknown"
"""The version of pods that an operator started which kept nothing yet."""
# As many as the Deployment keeps ReplicaSets for, beside the one in use.
_HISTORY = 2

Json = Mapping[str, Any]
Render = Callable[[Json], "Rendering"]
"""Today's rendering of a spec as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """What decides how pods run and changes only with a restart."""

    template: Object
    config_name: str
    config: Mapping[str, str]
    """The texts of `engine.json` and `gate.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One rendering, and from what it came."""

    version: str
    """The release that rendered it, with its own settings: `0.2.0+1f3a…`."""
    spec: Json
    rendering: Rendering
    live_shape: Any
    """The keys of `live.json` that its programs know, nested as they are."""
    revision: int = 0

    def text(self) -> str:
        """All but the number, for its name and its object."""
        document = {
            "version": self.version,
            "spec": self.spec,
            "template": self.rendering.template,
            "configName": self.rendering.config_name,
            "config": self.rendering.config,
            "liveShape": self.live_shape,
        }
        return codec.to_json(document)


def release_id(version: str, settings: object) -> str:
    """What a rendering of this release, with these settings of its operator, is called."""
    return f"{version}+{codec.digest(settings)[:8]}"


def found(observed: Observed, uid: str) -> list[Kept]:
    """What is kept for the resource with this uid, newest first; what cannot be read counts as not kept."""
    items = [item for item in observed.owned.values() if item["kind"] == KIND and is_owned(item, uid)]
    read = [one for item in items if (one := _read(item)) is not None]
    return sorted(read, key=lambda one: one.revision, reverse=True)


def _read(item: Object) -> Kept | None:
    try:
        data = json.loads(item["data"]["kept"])
        return Kept(
            version=data["version"],
            spec=data["spec"],
            rendering=Rendering(template=data["template"], config_name=data["configName"], config=data["config"]),
            live_shape=data["liveShape"],
            revision=int(item["revision"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def in_use(observed: Observed, service: ServiceSpec, known: Sequence[Kept]) -> Kept | None:
    """The one that the Deployment was given for the very generation that the resource is of; None: that is not known.

    The API server counts the generation up when somebody changes the spec, and not when a later definition fills fields
    in: whatever the spec reads like now, nobody asked for other pods.
    """
    deployment = observed.owned.get(("Deployment", service.name))
    if deployment is None or not is_owned(deployment, service.uid):
        return None
    said = deployment["metadata"].get("annotations") or {}
    if said.get(GENERATION_ANNOTATION) != str(service.generation):
        return None
    return next((one for one in known if _name(service, one) == said.get(RENDERING_ANNOTATION)), None)


def noted(service: ServiceSpec, kept: Kept) -> dict[str, str]:
    """The annotations by which `in_use` knows it again: the Deployment's own, since pods do not roll for those."""
    return {GENERATION_ANNOTATION: str(service.generation), RENDERING_ANNOTATION: _name(service, kept)}


def choose(known: Sequence[Kept], wanted: str, spec: Json, today: Rendering, render: Render, own: str) -> Kept:
    """By which rendering the pods of this spec are to run: one that is kept for it, else a new one of release `own`.

    `wanted` is `spec.runtime.version`; empty: whichever is kept. `today` is the spec as `render` makes it.

    Raises:
        InvalidSpec: the release that is wanted is neither kept for this spec nor the operator's own.
    """
    for one in known:
        if (not wanted or _is_of(one.version, wanted)) and _is_same(one.spec, spec, today, render):
            return one
    if wanted and not _is_of(own, wanted):
        problem = f"{wanted} is not kept for this spec, and this operator is {own}: name that one, or leave it out"
        raise InvalidSpec("spec.runtime.version", problem)
    number = max((one.revision for one in known), default=0) + 1
    return Kept(version=own, spec=spec, rendering=today, live_shape=json.loads(_live_shape()), revision=number)


@functools.cache
def _live_shape() -> str:
    """Of today's programs; as text, since whoever is given a shape may do with it as they like."""
    return json.dumps(shape(LiveConfig))


def _is_of(version: str, wanted: str) -> bool:
    return version == wanted or version.startswith(f"{wanted}+")


def _is_same(before: Json, spec: Json, today: Rendering, render: Render) -> bool:
    if before == spec:
        return True
    try:
        return render(before) == today
    except InvalidSpec:
        return False


def adopted(observed: Observed, uid: str, spec: Json) -> Kept | None:
    """The rendering of a Deployment that an operator made which kept none; None where there is no such Deployment."""
    ours = {found: item for found, item in observed.owned.items() if is_owned(item, uid)}
    deployment = next((item for item in ours.values() if item["kind"] == "Deployment"), None)
    if deployment is None:
        return None
    template = deployment["spec"]["template"]
    volumes = {one["name"]: one.get("configMap", {}).get("name", "") for one in template["spec"].get("volumes", ())}
    config = ours.get(("ConfigMap", volumes.get("sluice-config", "")))
    live = ours.get(("ConfigMap", volumes.get("sluice-live", "")))
    if config is None or live is None:
        return None
    try:
        live_shape = _shape_of(json.loads(live["data"]["live.json"]))
    except (KeyError, ValueError, RecursionError):
        return None
    # A template of the API has a creationTimestamp of its own, which is nobody's to apply.
    labelled = {name: value for name, value in template["metadata"].items() if name in {"labels", "annotations"}}
    rendering = Rendering(
        template={"metadata": labelled, "spec": template["spec"]},
        config_name=config["metadata"]["name"],
        config=config["data"],
    )
    return Kept(version=UNKNOWN, spec=spec, rendering=rendering, live_shape=live_shape, revision=1)


def revision_object(service: ServiceSpec, kept: Kept) -> Object:
    """The ControllerRevision that keeps it, named for its content."""
    return {
        "apiVersion": "apps/v1",
        "kind": KIND,
        "metadata": metadata(service, _name(service, kept)),
        "revision": kept.revision,
        # One text: the API server would otherwise note who owns each of its fields.
        "data": {"kept": kept.text()},
    }


def _name(service: ServiceSpec, kept: Kept) -> str:
    return f"{service.name}-{codec.digest([kept.revision, kept.text()])}"


def history(observed: Observed, desired: Sequence[Object]) -> list[Key]:
    """The revisions that stay beside the one that is desired: applying an old manifest brings back its very pods."""
    wanted = {key(item) for item in desired}
    others = [item for item in observed.owned.values() if item["kind"] == KIND and key(item) not in wanted]
    newest = sorted(others, key=lambda item: int(item.get("revision", 0)), reverse=True)
    return [key(item) for item in newest[:_HISTORY]]


def shape(kind: Any) -> Any:  # noqa: ANN401  # a type, or what typing has in place of one; JSON
    """The keys of a configuration, nested: objects as objects, lists as a list of one shape, all else null."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {field.name: shape(hints[field.name]) for field in dataclasses.fields(kind)}
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return shape(next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        return [shape(args[0])]
    return None


def _shape_of(document: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(document, dict):
        return {name: _shape_of(value) for name, value in document.items()}
    if isinstance(document, list):
        return [_shape_of(document[0])] if document else []
    return None


def known_part(document: Any, known: Any) -> Any:  # noqa: ANN401  # JSON
    """The document without the keys that are not in a shape."""
    if isinstance(document, dict) and isinstance(known, dict):
        return {name: known_part(value, known[name]) for name, value in document.items() if name in known}
    if isinstance(document, list) and isinstance(known, list) and known:
        return [known_part(item, known[0]) for item in document]
    return document


def unknown_part(document: Any, known: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401  # JSON
    """What `known_part` leaves out: paths and values."""
    if isinstance(document, dict) and isinstance(known, dict):
        for name, value in document.items():
            below = f"{path}.{name}" if path else name
            if name not in known:
                yield below, value
            else:
                yield from unknown_part(value, known[name], below)
    elif isinstance(document, list) and isinstance(known, list) and known:
        for index, item in enumerate(document):
            yield from unknown_part(item, known[0], f"{path}[{index}]")
