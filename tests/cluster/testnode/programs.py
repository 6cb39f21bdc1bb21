"""The node's programs, built from Go modules pinned under `programs/`: one module a program, since they disagree.

Another release: change its version in that go.mod (Kubernetes names its own twice, v1.N.P and v0.N.P for what it
publishes apart), then run `go mod tidy -e` in the folder and commit both files.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.testnode import cache, command
from cluster.testnode.errors import Missing
from cluster.testnode.progress import Progress

MODULES = Path(__file__).parents[1] / "programs"
GO_LEAST = (1, 26)


def _kubernetes_flags(version: str) -> str:
    """Without these Helm refuses the server: it would report version v0.0.0."""
    major, minor, _ = version.removeprefix("v").split(".")
    base = "k8s.io/component-base/version"
    return (
        f"-X {base}.gitVersion={version} -X {base}.gitMajor={major} -X {base}.gitMinor={minor} "
        f"-X k8s.io/client-go/pkg/version.gitVersion={version}"
    )


@dataclass(frozen=True, slots=True)
class Module:
    """One folder of `programs/`.

    Attributes:
        package: the import path whose version is the program's; empty for our own source.
        takes: how long it takes on two cores, for the person who waits.
        renamed: built names and wanted names, where a package's last word is not the program's.
    """

    name: str
    package: str
    takes: str
    tags: str = ""
    flags: Callable[[str], str] | None = None
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def source(self) -> Path:
        return MODULES / self.name

    def version(self) -> str:
        """The pinned version, as the module's go.mod has it."""
        found = re.search(rf"{re.escape(self.package)} (v\S+)", (self.source / "go.mod").read_text())
        assert found, f"{self.source}/go.mod requires {self.package}"
        return found[1]


ALL = (
    Module("pause", "", "ten seconds"),
    Module("etcd", "go.etcd.io/etcd/server/v3", "half a minute", renamed=(("server", "etcd"),)),
    Module("containerd", "github.com/containerd/containerd/v2", "a minute", tags="no_btrfs no_zfs no_devmapper"),
    Module("helm", "helm.sh/helm/v4", "two minutes"),
    Module("kubernetes", "k8s.io/kubernetes", "six to nine minutes", flags=_kubernetes_flags),
)
# What clusters run beside Sluice, for the tests of the full tier alone.
BESIDE = (
    Module(
        "keda",
        "github.com/kedacore/keda/v2",
        "six minutes",
        renamed=(("operator", "keda-operator"), ("adapter", "keda-adapter")),
    ),
    Module(
        "prometheus-operator",
        "github.com/prometheus-operator/prometheus-operator",
        "two minutes",
        renamed=(("operator", "prometheus-operator"),),
    ),
    Module(
        "prometheus", "github.com/prometheus/prometheus", "three minutes", tags="remove_all_sd enable_kubernetes_sd"
    ),
    Module("kube-router", "github.com/cloudnativelabs/kube-router/v2", "two minutes"),
)


def missing_go() -> str | None:
    """What is wrong with this machine's Go, or None."""
    wanted = f"Go {GO_LEAST[0]}.{GO_LEAST[1]} or newer"
    if not shutil.which("go"):
        return wanted
    said = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", said)
    if not found or (int(found[1]), int(found[2])) < GO_LEAST:
        return f"{wanted} (found {said or 'none'})"
    return None


def _key(module: Module) -> str:
    words = (module.tags, module.flags(module.version()) if module.flags else "", str(module.renamed or None))
    return cache.digest(sorted(module.source.iterdir()), words=words)


def cached(module: Module) -> bool:
    """Whether the module's programs are there already."""
    return (cache.folder() / "programs" / module.name / _key(module)).is_dir()


def ensure(progress: Progress, module: Module) -> Path:
    """The folder with the module's programs, built when it is not there yet.

    Raises:
        Missing: Go is absent or too old, or its module proxy cannot be reached.
        Broken: the build failed.
    """

    def make(made: Path) -> None:
        lacking = missing_go()
        if lacking:
            raise Missing(lacking)
        version = module.version() if module.package else ""
        flags = "-s -w" + (f" {module.flags(version)}" if module.flags else "")
        built = "tool" if module.package else "."
        argv = ["go", "build", "-trimpath", "-mod=readonly", "-tags", module.tags, "-ldflags", flags]
        with progress.task(module.name, f"building {version or module.name} (about {module.takes}, once)"):
            command.run(
                f"build-{module.name}",
                [*argv, "-o", f"{made}/", built],
                cwd=module.source,
                gently=True,
                env={"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": "-buildvcs=false"},
            )
        for built_as, name in module.renamed:
            (made / built_as).rename(made / name)

    return cache.ensure(f"programs/{module.name}", _key(module), make)


def path(folders: list[Path]) -> str:
    """A PATH that finds the programs, and Debian's system programs, before anything else."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"])
