"""The spec of an InferenceService, from the body that the API server (or `manifest.py`) already defaulted.

Owns the meaning of the CRD's fields; has no default of its own but for those that no definition may fill in, since an
earlier operator would restart pods for it (docs/decisions/0017). Pure. Next: `render.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from sluice_engine import codec
from sluice_engine.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from sluice_engine.errors import InvalidConfig
from sluice_engine.live_config import (
    AdmissionConfig,
    ClassConfig,
    LiveConfig,
    LiveSchedulingConfig,
    SLOConfig,
    TenantConfig,
)
from sluice_operator.errors import InvalidSpec
from sluice_operator.rendering.foreign import runtime
from sluice_operator.resource.adapters import parse_adapters
from sluice_operator.resource.model_source import parse_access, parse_source
from sluice_operator.resource.spec import Autoscaling, Json, RuntimeType, ServiceSpec
from sluice_operator.resource.units import parse_duration_us, parse_quantity_bytes
from sluice_sidecar.callers.trust import is_network


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Whatever goes wrong inside is a spec that is not understood.

    Raises:
        InvalidSpec: a field is missing or of another type (the CRD is another version's), or breaks a rule of engine or
            gate.
    """
    try:
        yield
    except KeyError as error:
        problem = "is missing: does the CRD in the cluster belong to this version of the operator?"
        raise InvalidSpec(f"spec: {error.args[0]}", problem) from error
    except InvalidConfig as error:
        raise InvalidSpec(f"spec: {error.field}", error.problem) from error
    except (TypeError, AttributeError, ValueError) as error:
        problem = f"a value is not of the type that this operator knows ({error})"
        raise InvalidSpec("spec", f"{problem}: does the CRD in the cluster belong to this version?") from error


def parse(body: Json) -> ServiceSpec:
    """The spec of a resource.

    Raises:
        InvalidSpec: a field is missing or of another type, or breaks a rule of engine or gate, or is more than
            another engine can do.
    """
    with understood():
        spec = _parse(body)
        runtime.check(spec)
    return spec


def _parse(body: Json) -> ServiceSpec:
    metadata, spec = body["metadata"], body["spec"]
    slo, scheduling, cache, admission = spec["slo"], spec["scheduling"], spec["cache"], spec["admission"]
    accelerator, rollout, preemption = spec["accelerator"], spec["rollout"], scheduling["preemption"]
    model, speculation = spec["model"], scheduling["speculation"]
    for kind in ("requests", "limits"):
        if accelerator["resourceName"] in spec["resources"].get(kind, {}):
            problem = f"must not name {accelerator['resourceName']}: accelerator.count asks for it"
            raise InvalidSpec(f"spec.resources.{kind}", problem)
    capacity, swap = cache.get("capacity"), cache.get("hostSwapCapacity", 0)
    served_name = model.get("servedName", metadata["name"])
    engine_model = ModelConfig(
        source=parse_source(model["source"]),
        served_name=served_name,
        data_type=model["dataType"],
        quantization=model.get("quantization", "Auto"),
        max_length_tokens=model.get("maxLengthTokens"),
    )
    return ServiceSpec(
        name=metadata["name"],
        namespace=metadata.get("namespace", ""),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        model=engine_model,
        adapters=parse_adapters(model, served_name, accelerator["count"]),
        hub=parse_access(model["source"]),
        runtime=_runtime_type(spec),
        image=spec["runtime"].get("image"),
        image_pull_policy=spec["runtime"]["imagePullPolicy"],
        runtime_version=spec["runtime"].get("version", ""),
        replicas=spec["replicas"],
        scheduling=SchedulerConfig(
            max_sequences=scheduling.get("maxSequences"),
            overlap_depth=scheduling.get("overlapDepth"),
            token_budget=scheduling.get("tokenBudget"),
            max_preemptions_per_request=preemption["maxPerRequest"],
            policy=scheduling["policy"],
            fairness_unit=scheduling.get("fairnessUnit"),
            victim=preemption["victim"],
            resume=preemption["resume"],
            speculation=SpeculationConfig(
                method=speculation["method"],
                draft_tokens=speculation["draftTokens"],
                draft_budget=speculation.get("draftBudget"),
            ),
        ),
        cache=CacheConfig(
            block_tokens=cache["blockTokens"],
            memory_percent=cache["memoryPercent"],
            capacity_bytes=None if capacity is None else parse_quantity_bytes(capacity, "spec.cache.capacity"),
            prefix_caching=cache["prefixCaching"],
            host_swap_bytes=parse_quantity_bytes(swap, "spec.cache.hostSwapCapacity") or None,
        ),
        live=LiveConfig(
            slo=SLOConfig(
                time_to_first_token_us=parse_duration_us(slo["timeToFirstToken"], "spec.slo.timeToFirstToken"),
                inter_token_latency_us=parse_duration_us(slo["interTokenLatency"], "spec.slo.interTokenLatency"),
                reference_prompt_tokens=slo["referencePromptTokens"],
                target_percent=float(slo["targetPercent"]),
                enforcement=slo["enforcement"],
            ),
            scheduling=LiveSchedulingConfig(
                prefill_chunk_tokens=scheduling.get("prefillChunkTokens"),
                max_prefill_tokens_per_request=scheduling.get("maxPrefillTokensPerRequest"),
                aging_interval_us=parse_duration_us(scheduling["agingInterval"], "spec.scheduling.agingInterval"),
            ),
            admission=AdmissionConfig(
                max_wait_us=parse_duration_us(admission["maxWait"], "spec.admission.maxWait"),
                kv_ceiling_percent=admission["kvCeilingPercent"],
                preemptions_per_minute=float(admission["preemptionsPerMinute"]),
                mode=admission["mode"],
                retry_budget_percent=admission["retryBudgetPercent"],
                classes=tuple(
                    ClassConfig(name=one["name"], ceiling_percent=one["ceilingPercent"])
                    for one in admission.get("classes", ())
                ),
                tenants=tuple(
                    TenantConfig(
                        name=tenant["name"],
                        weight=tenant["weight"],
                        tokens_per_second=tenant.get("tokensPerSecond"),
                    )
                    for tenant in admission.get("tenants", ())
                ),
            ),
        ),
        trusted_peers=_networks(admission.get("trustedPeers", ())),
        api_keys_secret=admission.get("apiKeysSecretRef", {}).get("name", ""),
        resources=spec["resources"],
        accelerator_count=accelerator["count"],
        accelerator_resource=accelerator["resourceName"],
        strategy=rollout["strategy"],
        drain_timeout_us=parse_duration_us(rollout["drainTimeout"], "spec.rollout.drainTimeout"),
        autoscaling=_autoscaling(spec.get("autoscaling")),
        pod_monitor=spec["monitoring"]["podMonitor"] == "Enabled",
        pod_template=spec["podTemplate"],
        cost_basis=_cost_basis(spec, engine_model),
    )


def _runtime_type(spec: Json) -> RuntimeType:
    found: RuntimeType = spec["runtime"].get("type", "Sluice")
    return found


def _cost_basis(spec: Json, model: ModelConfig) -> Json:
    # By the fields that are known here: an upgrade brings the later definition first, whose defaults are in every spec
    # that is read from then on, and what pods run by must not change with them.
    known = {
        "accelerator": ("count", "resourceName"),
        "resources": ("requests", "limits", "claims"),
        # The same engine under another version of the template costs the same.
        "runtime": ("image", "imagePullPolicy"),
    }
    parts = {part: {name: spec[part].get(name) for name in names} for part, names in known.items()}
    parts["runtime"]["type"] = _runtime_type(spec)
    # What adapters there are changes nothing about the model's own steps.
    return {"model": codec.encode(model), **parts}


def _autoscaling(written: Json | None) -> Autoscaling | None:
    if written is None:
        return None
    return Autoscaling(min_replicas=written["minReplicas"], max_replicas=written["maxReplicas"])


def _networks(peers: Sequence[str]) -> tuple[str, ...]:
    for index, peer in enumerate(peers):
        if not is_network(peer):
            problem = f"{peer!r} is no network: write an address, or its first one and a length, such as 10.0.0.0/8"
            raise InvalidSpec(f"spec.admission.trustedPeers[{index}]", problem)
    return tuple(peers)
