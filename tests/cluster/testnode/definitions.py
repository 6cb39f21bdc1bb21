"""CustomResourceDefinitions of other projects, as their own releases have them: files of their Go modules.

The API server then judges what we make by the real schema. Nothing of those projects runs.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from cluster.testnode import cache, command
from cluster.testnode.errors import Broken, Missing
from cluster.testnode.progress import Progress


@dataclass(frozen=True, slots=True)
class Definitions:
    """Some definitions of one module."""

    name: str
    module: str
    sum: str
    """As the checksum database has it: a module that is another is refused."""
    files: tuple[str, ...]
    more: tuple[str, ...] = ()
    """What else the module's own program needs: definitions that are none of ours, its rights. In the folder `more`."""


PROMETHEUS_OPERATOR = Definitions(
    name="prometheus-operator",
    module="github.com/prometheus-operator/prometheus-operator@v0.85.0",
    sum="h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
    files=tuple(
        f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml"
        for kind in ("podmonitors", "servicemonitors", "prometheusrules")
    ),
    more=(
        *(
            f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml"
            for kind in ("alertmanagers", "alertmanagerconfigs", "probes", "prometheuses", "scrapeconfigs")
        ),
        "example/rbac/prometheus-operator/prometheus-operator-cluster-role.yaml",
    ),
)
KEDA = Definitions(
    name="keda",
    module="github.com/kedacore/keda/v2@v2.21.0",
    sum="h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps=",
    files=("config/crd/bases/keda.sh_scaledobjects.yaml",),
    more=(
        *(
            f"config/crd/bases/{name}.yaml"
            for name in (
                "eventing.keda.sh_cloudeventsources",
                "eventing.keda.sh_clustercloudeventsources",
                "keda.sh_clustertriggerauthentications",
                "keda.sh_scaledjobs",
                "keda.sh_triggerauthentications",
            )
        ),
        *(f"config/{part}/{name}.yaml" for part in ("rbac", "metrics-server") for name in ("role", "role_binding")),
    ),
)
ALL = (PROMETHEUS_OPERATOR, KEDA)


def ensure(progress: Progress, wanted: Definitions) -> Path:
    """A folder with the files.

    Raises:
        Missing: Go is absent, or its module proxy cannot be reached.
        Broken: the module is not the one that was meant.
    """

    def make(made: Path) -> None:
        if not shutil.which("go"):
            raise Missing("Go")
        with progress.task(wanted.name, "fetching its definitions"):
            (made / "go.mod").write_text("module testnode/definitions\n")
            command.run(f"definitions-{wanted.name}", ["go", "mod", "download", wanted.module], cwd=made)
            words = ["go", "mod", "download", "-json", wanted.module]  # now from Go's own cache
            said = json.loads(subprocess.run(words, cwd=made, capture_output=True, text=True, check=True).stdout)
        if said["Sum"] != wanted.sum:
            raise Broken(f"{wanted.module} has the checksum {said['Sum']}, not {wanted.sum}")
        for file in wanted.files:
            copied = shutil.copyfile(Path(said["Dir"]) / file, made / Path(file).name)
            assert yaml.safe_load(copied.read_text())["kind"] == "CustomResourceDefinition", file
        (made / "more").mkdir()
        for file in wanted.more:
            shutil.copyfile(Path(said["Dir"]) / file, made / "more" / file.replace("/", "-"))
        (made / "go.mod").unlink()

    return cache.ensure(f"definitions/{wanted.name}", cache.digest([Path(__file__)], words=[wanted.module]), make)
