"""What others make of the objects for them: KEDA's own definition, and the HPA of the docs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.service.space import Space
from cluster.testnode import definitions
from cluster.testnode.progress import Progress
from sluice_operator.rendering.autoscale import scaled_object
from sluice_operator.resource.parsing import parse

pytestmark = pytest.mark.cluster

DOCS = Path(__file__).resolve().parents[3] / "docs/autoscaling.md"
STRICT = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
BOUNDS = {"minReplicas": 1, "maxReplicas": 3}


@pytest.fixture
def keda(space: Space) -> Iterator[None]:
    """The node while it serves KEDA's ScaledObject."""
    folder = definitions.ensure(Progress(sys.stderr), definitions.KEDA)
    files = [word for file in sorted(folder.glob("*.yaml")) for word in ("-f", str(file))]
    space.node.kubectl("apply", "--server-side", *files)
    space.node.kubectl("wait", "--for=condition=Established", "customresourcedefinition/scaledobjects.keda.sh")
    try:
        yield
    finally:
        space.node.kubectl("delete", *files)


@pytest.mark.usefixtures("keda")
def test_keda_takes_the_scaled_object_and_the_api_server_the_hpa_of_the_docs(space: Space) -> None:
    space.apply(space.tiny("scaled", replicas=0, autoscaling=BOUNDS))
    spec = parse(space.get("inferenceservices.sluice.dev", "scaled"))
    assert spec.autoscaling is not None

    made = scaled_object(spec, spec.autoscaling, "http://prometheus.monitoring:9090")

    assert "serverside-applied" in space.kubectl(*STRICT, stdin=json.dumps(made))
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (hpa,) = [block for block in blocks if "HorizontalPodAutoscaler" in block]
    assert "serverside-applied" in space.kubectl(*STRICT, stdin=hpa)
    assert yaml.safe_load(hpa)["spec"]["scaleTargetRef"] == made["spec"]["scaleTargetRef"] | {"name": "chat"}


def test_without_keda_the_condition_says_that_nothing_scales(space: Space) -> None:
    space.apply(space.tiny("unscaled", replicas=0, autoscaling=BOUNDS))
    space.wait("unscaled", "condition=Autoscaling=false")

    assert space.condition("unscaled", "Autoscaling")["reason"] == "ScaledObjectMissing"
    space.kubectl("scale", "inferenceservices.sluice.dev/unscaled", "--replicas=1")
    assert space.get("inferenceservices.sluice.dev", "unscaled")["spec"]["replicas"] == 1


@pytest.mark.full
@pytest.mark.usefixtures("keda")
def test_an_operator_that_finds_keda_and_knows_no_prometheus_says_so(space: Space) -> None:
    space.apply(space.tiny("asks", replicas=0, autoscaling=BOUNDS))

    # Definitions are looked for once a minute.
    space.wait("asks", 'jsonpath={.status.conditions[?(@.type=="Autoscaling")].reason}=PrometheusUnknown')
