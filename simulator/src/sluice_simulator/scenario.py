"""A scenario: an InferenceService, the machine it runs on, and the loads that it is put under. YAML, read strictly.

Owns the file and what `--set` changes in it; the service's own fields are read and defaulted as the API server and the
operator would. Next: `loads.py`, `run.py`.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice_engine.core.link import Link
from sluice_engine.core.price import PLANNING_LINK_BYTES_PER_S, PLANNING_TOKEN_BYTES
from sluice_engine.core.step_limits import Capacity
from sluice_engine.core.steptime import PlanningProfile, StepTable, StepTimes, step_quantile
from sluice_engine.errors import EngineError
from sluice_engine.table_file import read_step_table
from sluice_operator.errors import InvalidManifest
from sluice_operator.resource import manifest, plain_yaml
from sluice_operator.resource.spec import ServiceSpec
from sluice_simulator.errors import InvalidInput
from sluice_simulator.executor import Slowdown
from sluice_simulator.faults import Faults, read_faults
from sluice_simulator.fields import Fields
from sluice_simulator.loads import Load, Room, read_load
from sluice_simulator.record import read_record
from sluice_simulator.router import POLICIES, Policy
from sluice_simulator.workload import ClosedLoop

KEYS = (
    "name", "seed", "duration", "warmup", "service", "machine", "router", "gate", "promptBytesPerToken", "faults",
    "loads",
)  # fmt: skip
_DEFAULT_POOL_TOKENS = 262_144
_DEFAULT_LENGTH_TOKENS = 32_768
_MOST_POOL_TOKENS = 1 << 30
_MOST_TOKEN_BYTES = 1 << 26
# Of a link's three figures: far above any that works.
_MOST_LINK = 1 << 40
# The largest decode batch that an engine on a GPU measures at its start.
_PLANNING_DECODES = 256
_MOST_REPLICAS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a manifest does not say of the machine."""

    times: StepTimes
    """What the engine begins with; it goes on learning."""
    real_times: StepTimes
    """What steps take, but for the noise."""
    times_source: str
    noise_sigma: float
    """Standard deviation of the logarithm of a step's real time over its predicted one."""
    slowdown: float
    slowdowns: tuple[Slowdown, ...]
    told_factor: float
    """The gate is told step times so many times those that the engine knows."""
    host_overhead_us: int
    """Of each step, outside the device."""
    capacity: Capacity
    num_host_blocks: int
    """What fits into the service's `cache.hostSwapCapacity`; 0 where it has none."""
    link: Link | None
    """The way to the host; None without host blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that decides a run."""

    name: str
    seed: int
    duration_us: int | None
    """Nothing arrives after it; None: until the traces end."""
    warmup_us: int
    """What arrives before this is not counted."""
    spec: ServiceSpec
    machine: Machine
    router: Policy
    has_gate: bool
    bytes_per_token: float | None
    faults: Faults
    loads: tuple[Load, ...]

    @property
    def window_us(self) -> int:
        """How long what counts arrives."""
        return self.end_us - self.warmup_us

    @property
    def end_us(self) -> int:
        """When the last request may arrive."""
        if self.duration_us is not None:
            return self.duration_us
        ends = [load.source.last_us for load in self.loads if not isinstance(load.source, ClosedLoop)]
        return max(1, *(end_us + 1 for end_us in ends if end_us is not None))


def load_document(path: str) -> dict[str, Any]:
    """The scenario file as it is written.

    Raises:
        InvalidInput: it cannot be read, is not YAML, or is no mapping.
    """
    try:
        documents = plain_yaml.load_all(manifest.read_text(path))
    except plain_yaml.InvalidYAML as error:
        raise InvalidInput(path, "", str(error)) from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidInput(path, "", "must hold one mapping, the scenario")
    return documents[0]


def with_settings(document: dict[str, Any], settings: Iterable[tuple[str, Any]], path: str) -> dict[str, Any]:
    """The document with some values changed: a key of the scenario, or, for any other, of the service's spec.

    Raises:
        InvalidInput: a key leads nowhere.
    """
    changed = copy.deepcopy(document)
    for key, value in settings:
        steps = key.split(".")
        if not all(steps):
            raise InvalidInput("--set", key, "is no key: write a.b.c=value")
        if steps[0] == "spec":
            del steps[0]
        target: Any = changed if steps and steps[0] in KEYS else _spec_of(changed, path)
        _set(target, steps, value, key)
    return changed


def parse(document: dict[str, Any], path: str) -> Scenario:
    """The scenario that a document describes; files that it names are found from the folder of `path`.

    Raises:
        InvalidInput, InvalidManifest: something breaks a rule; the text names file and key.
    """
    folder = Path() if path == "-" else Path(path).parent
    fields = Fields(document, path)
    name = fields.text("name", Path(path).stem)
    seed = fields.whole("seed", 0, 2**63 - 1, 0)
    duration_us = fields.optional("duration", lambda key: fields.duration_us(key, least_us=1))
    warmup_us = fields.duration_us("warmup", 0)
    spec = _read_spec(fields, folder, name)
    machine = _read_machine(fields.section("machine"), spec, folder)
    router = fields.choice("router", POLICIES, "RoundRobin")
    has_gate = fields.choice("gate", ("Enabled", "Disabled"), "Enabled") == "Enabled"
    bytes_per_token = fields.optional("promptBytesPerToken", lambda key: fields.number(key, 0.5, 16))
    faults = read_faults(fields)
    room = Room(max_length_tokens=machine.capacity.max_length_tokens, pool_tokens=machine.capacity.pool_tokens)
    loads = tuple(read_load(one, room, folder) for one in fields.sections("loads"))
    fields.end()
    names = [load.name for load in loads]
    if twice := next((one for one in names if names.count(one) > 1), None):
        raise fields.problem("loads", f"two are named {twice}: each needs a name of its own")
    if duration_us is None and any(
        isinstance(load.source, ClosedLoop) or load.source.last_us is None for load in loads
    ):
        kinds = "closed loop" if any(isinstance(load.source, ClosedLoop) for load in loads) else "stream"
        raise fields.problem("duration", f"is missing: a {kinds} has no end of its own")
    scenario = Scenario(
        name=name,
        seed=seed,
        duration_us=duration_us,
        warmup_us=warmup_us,
        spec=spec,
        machine=machine,
        router=router,  # type: ignore[arg-type]  # one of POLICIES
        has_gate=has_gate,
        bytes_per_token=bytes_per_token,
        faults=faults,
        loads=loads,
    )
    if scenario.window_us <= 0:
        raise fields.problem("warmup", "must end before the last request arrives")
    return scenario


def _spec_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The service's spec to be changed: a manifest that is named is read in first."""
    service = document.setdefault("service", {})
    if isinstance(service, dict) and "file" in service:
        folder = Path() if path == "-" else Path(path).parent
        service = document["service"] = _named_manifest(service, folder, path)
    spec = service.setdefault("spec", {}) if isinstance(service, dict) else None
    if not isinstance(spec, dict):
        raise InvalidInput(path, "service.spec", "must be a mapping")
    return spec


def _set(target: Any, steps: list[str], value: Any, key: str) -> None:  # noqa: ANN401  # YAML
    for index, step in enumerate(steps):
        is_last = index == len(steps) - 1
        if isinstance(target, list):
            if not step.isdigit() or int(step) >= len(target):
                raise InvalidInput("--set", key, f"{step!r} is none of the list's {len(target)} places (from 0)")
            place: Any = int(step)
        elif isinstance(target, dict):
            place = step
            if not is_last and not isinstance(target.get(step), (dict, list)):
                target[step] = {}
        else:
            raise InvalidInput("--set", key, f"{'.'.join(steps[:index])} has no fields")
        if is_last:
            target[place] = value
        else:
            target = target[place]


def _named_manifest(service: dict[str, Any], folder: Path, path: str) -> dict[str, Any]:
    fields = Fields(service, path, "service")
    file = str(folder / fields.text("file"))
    fields.end()
    found = manifest.documents(file)
    if len(found) > 1:
        raise InvalidInput(file, "", f"holds {len(found)} InferenceServices: one can be simulated")
    return found[0]


def _read_spec(fields: Fields, folder: Path, name: str) -> ServiceSpec:
    service = fields.take("service")
    where = fields.file
    if service is None:
        service = {}
    if not isinstance(service, dict):
        raise fields.problem("service", "must be an InferenceService, or {file: its file}")
    if "file" in service:
        where = str(folder / str(service["file"]))
        service = _named_manifest(service, folder, fields.file)
    elif unknown := sorted(service.keys() - {"apiVersion", "kind", "metadata", "spec", "status"}):
        raise fields.problem(f"service.{unknown[0]}", "is not a known key; known are apiVersion, kind, metadata, spec")
    spec = service.get("spec") or {}
    # The model is not loaded, so it need not be named.
    filled = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")[:50] or "service"},
        **service,
        "spec": {"model": {"source": {"image": {"path": "/model"}}}, **spec} if isinstance(spec, dict) else spec,
    }
    try:
        read = manifest.read_spec(filled, where)
    except InvalidManifest as error:
        raise InvalidInput(where, "service" if where == fields.file else "", error.problems[0]) from error
    if not 1 <= read.replicas <= _MOST_REPLICAS:
        raise InvalidInput(where, "service: spec.replicas", f"must be 1 to {_MOST_REPLICAS}, not {read.replicas}")
    return read


def _read_machine(fields: Fields, spec: ServiceSpec, folder: Path) -> Machine:
    times, real_times, source = _read_times(fields, folder)
    table = times if isinstance(times, StepTable) else None
    default_noise = 0.0
    if table is not None:
        # The tail that the engine learned, or assumes until it has.
        z = statistics.NormalDist().inv_cdf(step_quantile(spec.live.slo.target_percent))
        default_noise = 100 * (math.exp(math.log(max(1.0, table.tail_ratio)) / z) - 1) if z > 0 else 0.0
    noise = fields.number("noisePercent", 0, 200, default_noise)
    slowdown = fields.number("slowdown", 0.01, 100, 1.0)
    slowdowns = tuple(map(_read_slowdown, fields.sections("slowdowns"))) if fields.has("slowdowns") else ()
    block = spec.cache.block_tokens
    told_factor = fields.number("toldFactor", 0.01, 100, 1.0)
    pool_tokens = fields.whole("kvCapacityTokens", block, _MOST_POOL_TOKENS, _DEFAULT_POOL_TOKENS)
    length = fields.whole(
        "maxLengthTokens", 2, _MOST_POOL_TOKENS, spec.model.max_length_tokens or _DEFAULT_LENGTH_TOKENS
    )
    token_bytes = fields.whole("kvBytesPerToken", 1, _MOST_TOKEN_BYTES, PLANNING_TOKEN_BYTES)
    num_host_blocks = (spec.cache.host_swap_bytes or 0) // (token_bytes * block)
    link = _read_link(fields.section("link"), token_bytes * block)
    fields.end()
    return Machine(
        times=times,
        real_times=real_times,
        times_source=source,
        noise_sigma=math.log1p(noise / 100),
        slowdown=slowdown,
        slowdowns=slowdowns,
        told_factor=told_factor,
        host_overhead_us=table.host_overhead_us if table else 0,
        capacity=Capacity(
            num_blocks=pool_tokens // block,
            block_tokens=block,
            max_length_tokens=length,
            max_decode_requests=table.decode_axis[-1]
            if table
            else max(_PLANNING_DECODES, spec.scheduling.max_sequences or 0),
            max_prefill_tokens=table.prefill_axis[-1] if table else _MOST_POOL_TOKENS,
        ),
        num_host_blocks=num_host_blocks,
        link=link if num_host_blocks else None,
    )


def _read_slowdown(fields: Fields) -> Slowdown:
    from_us = fields.duration_us("at")
    until_us = from_us + fields.duration_us("lasting", least_us=1)
    one = Slowdown(from_us, until_us, fields.number("factor", 0.01, 100))
    fields.end()
    return one


def _read_link(fields: Fields, block_bytes: int) -> Link:
    """The measured way to the host, as `/state` tells it; left out, one at the speed of the planning figures."""
    planned_ns = -(-block_bytes * 1_000_000_000 // PLANNING_LINK_BYTES_PER_S)
    link = Link(
        fixed_us=fields.whole("fixedMicroseconds", 0, _MOST_LINK, 0),
        out_ns_per_block=fields.whole("outNanosecondsPerBlock", 1, _MOST_LINK, planned_ns),
        in_ns_per_block=fields.whole("inNanosecondsPerBlock", 1, _MOST_LINK, planned_ns),
    )
    fields.end()
    return link


def _read_times(fields: Fields, folder: Path) -> tuple[StepTimes, StepTimes, str]:
    """What the engine begins with, what steps take, and where both come from."""
    section = fields.section("stepTimes")
    if section.has("table"):
        file = str(folder / section.text("table"))
        section.end()
        try:
            table = read_step_table(manifest.read_text(file))
        except (EngineError, ValueError, RecursionError) as error:
            raise InvalidInput(file, "", f"is no step table: {error}") from error
        except InvalidManifest as error:
            raise InvalidInput(file, "", error.problems[0]) from error
        return table, table, f"measured: {table.measured_on or file}"
    section.take("table")
    if section.has("record"):
        record = read_record(folder / section.text("record"))
        section.end()
        if record.table is None:
            raise InvalidInput(record.file, "table", "is missing: the record has no step times")
        return record.table, record.learned or record.table, f"measured: {record.table.measured_on or record.file}"
    section.take("record")
    plan = PlanningProfile()
    profile = PlanningProfile(
        fixed_us=section.duration_us("fixed", plan.fixed_us, most_us=60_000_000),
        per_prefill_token_ns=section.whole("perPrefillTokenNanoseconds", 1, 10**9, plan.per_prefill_token_ns),
        decode_us=section.duration_us("decode", plan.decode_us, most_us=60_000_000),
    )
    section.end()
    return profile, profile, "planning profile" if profile == plan else "planning profile with values of the scenario"
