"""Which rendering a resource's pods run by, from the resource as the API server has it.

Owns bringing a kept spec up to today's schema, so that a default that a newer definition added changes nothing, and
telling what a newer release would change. Next: `kept.py`, which decides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from sluice_engine import codec
from sluice_operator.config import Settings
from sluice_operator.plan import Observed
from sluice_operator.rendering import kept as kepts
from sluice_operator.rendering.kept import Json, Kept, Rendering
from sluice_operator.rendering.pod_template import Object
from sluice_operator.rendering.render import live_document, rendering
from sluice_operator.resource import manifest, parsing, schema
from sluice_operator.resource.spec import ServiceSpec
from sluice_operator.status.situation import Runtime


def choose(body: Object, spec: ServiceSpec, observed: Observed, settings: Settings) -> tuple[Kept, Runtime]:
    """The rendering that the pods of a resource run by, and what is told of it.

    Raises:
        InvalidSpec: `spec.runtime.version` names a release that cannot be had.
    """

    def render(written: Json) -> Rendering:
        as_today = parsing.parse(_defaulted({**body, "spec": dict(written)}))
        with parsing.understood():
            return rendering(as_today, settings.images, settings.otlp_endpoint)

    written = _without_version(body["spec"])
    known = kepts.found(observed, spec.uid)
    if not known and not spec.runtime_version and _was_applied(body):
        before = kepts.adopted(observed, spec.uid, written)
        known = [before] if before else []
    today = render(written)
    chosen = kepts.in_use(observed, spec, known)
    if chosen is None:
        chosen = kepts.choose(known, spec.runtime_version, written, today, render, settings.release)
    return chosen, _runtime(chosen, spec, body, today=today, own=settings.release)


def _runtime(chosen: Kept, spec: ServiceSpec, body: Object, *, today: Rendering, own: str) -> Runtime:
    full, given = codec.encode(spec.live), live_document(spec, chosen)
    is_same = chosen.rendering == today and given == full
    return Runtime(
        version=chosen.version,
        newer="" if is_same else own,
        waiting=tuple(_set_since(full, body, chosen)),
        live_hash=codec.digest(given),
    )


def _set_since(full: Object, body: Object, chosen: Kept) -> Iterator[str]:
    """What `live.json` leaves out and somebody set: what has its default changes nothing."""
    left_out = list(kepts.unknown_part(full, chosen.live_shape))
    if not left_out:
        return
    before = codec.encode(parsing.parse(_defaulted({**body, "spec": dict(chosen.spec)})).live)
    defaults = list(kepts.unknown_part(before, chosen.live_shape))
    yield from (path for path, value in left_out if (path, value) not in defaults)


def _was_applied(body: Object) -> bool:
    """Whether an operator had carried out this very spec: then the Deployment is what became of it."""
    seen = body.get("status", {}).get("observedGeneration")
    return seen is not None and seen == body["metadata"].get("generation")


def _without_version(spec: Json) -> Json:
    runtime = {name: value for name, value in spec.get("runtime", {}).items() if name != "version"}
    return {**spec, "runtime": runtime}


@functools.cache
def _schema() -> schema.Schema:
    (version,) = [one for one in manifest.load_crd()["spec"]["versions"] if one["storage"]]
    found: schema.Schema = version["schema"]["openAPIV3Schema"]
    return found


def _defaulted(body: Object) -> Object:
    filled: Object = schema.with_defaults(_schema(), body)
    return filled
