"""What the chart renders, against golden files: `make golden` rewrites them, and review reads the diff."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from charts.helm import CHART, ROOT, Helm

GOLDEN = Path(__file__).parent / "golden"
CRD = ROOT / "crds/inferenceservices.sluice.dev.yaml"
DIGEST = "sha256:" + "ab" * 32

CASES = {
    "default": [],
    "digests": [f"--set-string=images.{part}.digest={DIGEST}" for part in ("operator", "engine", "gate")]
    + ["--set=images.registry=registry.example.com/mirror"],
    "namespaced": ["--set=watchNamespaces={team-a,team-b}"],
    "without-crds": ["--set=crds.install=false"],
    "monitoring": [
        "--api-versions=monitoring.coreos.com/v1/PrometheusRule",
        "--api-versions=monitoring.coreos.com/v1/ServiceMonitor",
        "--show-only=templates/prometheusrule.yaml",
        "--show-only=templates/servicemonitor.yaml",
    ],
    "everything-set": [f"--values={Path(__file__).parent / 'everything-set.yaml'}"],
}


def without_schema(rendered: str) -> str:
    """The CRD's own lines left out: another test holds them to crds/."""
    body = CRD.read_text().split("\nspec:\n", 1)[1]
    return rendered.replace(body.rstrip("\n"), "  # as in crds/")


@pytest.mark.parametrize("case", [pytest.param(name, id=f"with-{name}-values") for name in CASES])
def test_the_chart_renders_what_the_golden_file_holds(helm: Helm, case: str) -> None:
    rendered = without_schema(helm.template(*CASES[case]))

    golden = GOLDEN / f"{case}.yaml"
    if os.environ.get("SLUICE_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered)
    assert rendered == golden.read_text()


def test_helm_lint_finds_nothing(helm: Helm) -> None:
    done = helm.run("lint", "--strict", str(CHART))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_the_rendered_definition_is_the_one_in_crds_and_stays_after_an_uninstall(helm: Helm) -> None:
    (rendered,) = [one for one in helm.objects() if one["kind"] == "CustomResourceDefinition"]
    source = yaml.safe_load(CRD.read_text())

    assert rendered["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert rendered["metadata"]["name"] == source["metadata"]["name"]
    assert {key: rendered[key] for key in source if key != "metadata"} == {
        key: source[key] for key in source if key != "metadata"
    }


def test_the_operator_meets_the_restricted_pod_security_standard(helm: Helm) -> None:
    (deployment,) = [one for one in helm.objects() if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])


def test_the_notes_say_the_next_command(helm: Helm) -> None:
    done = helm.run("install", "sluice", str(CHART), "--namespace", "sluice-system", "--dry-run=client")

    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:\n", 1)[1]
    assert "rollout status deployment/sluice-operator" in notes
    assert "kubectl apply -n default -f -" in notes
    assert "kubectl delete customresourcedefinition inferenceservices.sluice.dev" in notes
    example = (ROOT / "crds/examples/demo-cpu.yaml").read_text()
    assert all(line.strip() in notes for line in example.splitlines())


def test_the_packed_chart_renders_the_same_with_nothing_beside_it(helm: Helm, tmp_path: Path) -> None:
    done = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (packed,) = tmp_path.glob("sluice-*.tgz")

    rendered = helm.run("template", "sluice", str(packed), "--namespace", "sluice-system")

    assert rendered.stdout == helm.template()


def test_every_image_of_an_air_gapped_install_is_the_registrys_own_and_pinned(helm: Helm) -> None:
    rendered = helm.template(*CASES["digests"])

    images = set(re.findall(r"(?:image|value): (\S*sluice-(?:operator|engine|sidecar)[@:]\S*)", rendered))
    assert images == {
        f"registry.example.com/mirror/sluice-{part}@{DIGEST}" for part in ("operator", "engine", "sidecar")
    }
