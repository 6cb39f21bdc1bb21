"""Rules of the house that no type checker knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("engine_image/src", "sidecar/src", "operator/src")

# What a pure file may import of the standard library: nothing that reads a clock, a file or a random number.
PURE_STDLIB = {
    "__future__", "array", "bisect", "calendar", "collections", "contextlib", "copy", "dataclasses", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "hmac", "ipaddress", "itertools", "json", "math", "operator", "re",
    "statistics", "string", "textwrap", "types", "typing",
}  # fmt: skip
PURE_PROJECT = {
    "sluice_engine.model_files.hub_files",
    "sluice_engine.bodies", "sluice_engine.codec", "sluice_engine.config", "sluice_engine.live_config",
    "sluice_engine.errors", "sluice_engine.core",
    "sluice_sidecar.config", "sluice_sidecar.errors", "sluice_sidecar.admission", "sluice_sidecar.bounds",
    "sluice_sidecar.deadlines", "sluice_sidecar.capacity", "sluice_sidecar.waiting", "sluice_sidecar.retries",
    "sluice_sidecar.estimates.estimate", "sluice_sidecar.estimates.fitting",
    "sluice_sidecar.estimates.media", "sluice_sidecar.estimates.outputs",
    "sluice_sidecar.estimates.pricing", "sluice_sidecar.estimates.prompt", "sluice_sidecar.estimates.upper",
    "sluice_sidecar.estimates.work", "sluice_sidecar.refusals",
    "sluice_sidecar.callers.api_keys", "sluice_sidecar.callers.identity", "sluice_sidecar.callers.quotas",
    "sluice_sidecar.callers.trust", "sluice_sidecar.telemetry.decisions", "sluice_sidecar.telemetry.demand",
    "sluice_sidecar.telemetry.headroom", "sluice_sidecar.telemetry.measure", "sluice_sidecar.telemetry.regret",
    "sluice_sidecar.telemetry.state", "sluice_sidecar.web.events", "sluice_sidecar.web.shedding",
    "sluice_operator.errors", "sluice_operator.plan", "sluice_operator.observed", "sluice_operator.status",
    "sluice_operator.resource.adapters",
    "sluice_operator.resource.cel", "sluice_operator.resource.model_source", "sluice_operator.resource.schema",
    "sluice_operator.resource.spec", "sluice_operator.resource.units",
    "sluice_operator.rendering.autoscale", "sluice_operator.rendering.files", "sluice_operator.rendering.foreign",
    "sluice_operator.rendering.kept", "sluice_operator.rendering.labels", "sluice_operator.rendering.ownership",
    "sluice_operator.rendering.pod_template", "sluice_operator.rendering.render", "sluice_operator.rendering.rollout",
    "sluice_operator.rendering.surroundings",
    "sluice_operator.cluster.kinds", "sluice_operator.local.environment",
}  # fmt: skip


CORE = ROOT / "engine_image/src/sluice_engine/core"

# Forgets what the interpreter's start imported, so that the script's imports look at its own folder first.
RUN_AS_SCRIPT = """
import sys
for name in ("operator", "_operator", "json", "collections", "functools", "keyword", "reprlib"):
    sys.modules.pop(name, None)
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
exec(open(sys.argv[1]).read())
"""


SOURCE_OF = {
    "sluice_engine": ROOT / "engine_image/src",
    "sluice_sidecar": ROOT / "sidecar/src",
    "sluice_operator": ROOT / "operator/src",
}


def pure_files() -> list[Path]:
    """Every file that PURE_PROJECT names, and those of the packages in it."""
    files = []
    for module in sorted(PURE_PROJECT):
        path = SOURCE_OF[module.partition(".")[0]] / module.replace(".", "/")
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return files


def is_package(module: str) -> bool:
    source = SOURCE_OF.get(module.partition(".")[0])
    return source is not None and (source / module.replace(".", "/")).is_dir()


def is_pure(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:length]) in PURE_PROJECT for length in range(2, len(parts) + 1))


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if is_package(module) else {module}
    return found


@pytest.mark.parametrize("path", pure_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pure_file_imports_only_what_is_pure(path: Path) -> None:
    for module in imported_modules(path):
        pure = PURE_STDLIB | ({"numpy"} if CORE in path.parents or path.name == "peak.py" else set())
        assert is_pure(module) or module.split(".")[0] in pure, f"{path.name} imports {module}"


def test_a_folder_called_operator_does_not_break_the_standard_library() -> None:
    program = "import json, operator, collections; print(operator.add(1, 2), operator.__file__)"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.startswith("3 ")
    assert str(ROOT / "operator") not in done.stdout


def test_a_script_run_beside_the_folder_still_imports_json(tmp_path: Path) -> None:
    """Python puts a script's own folder first on its path: there the folder `operator` lies beside it."""
    for name in ("operator", "sidecar", "engine_image"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "script.py"
    script.write_text("import json, operator; print(operator.add(1, 2))")

    done = subprocess.run(
        [sys.executable, "-I", "-c", RUN_AS_SCRIPT, str(script)], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_nothing_that_python_would_import_is_named_operator() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )

    assert not [name for name in tracked if name.endswith("/operator.py") or name == "operator.py"]
    assert "operator/__init__.py" not in tracked
    packages = [name for name in tracked if name.endswith("operator/__init__.py")]
    assert all(name.endswith("sluice_operator/__init__.py") for name in packages)


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    ("absent", "modules"),
    [
        pytest.param(
            ["torch"],
            "sluice_engine.serving.server, sluice_engine.serving.service, sluice_engine.protocol, "
            "sluice_engine.text.tokenizer, sluice_sidecar.server",
            id="the engine's serving side and the gate without torch",
        ),
        pytest.param(
            ["torch", "numpy"],
            "sluice_sidecar.telemetry.state, sluice_operator.handlers, sluice_operator.cli.commands",
            id="operator and command also without NumPy",
        ),
    ],
)
def test_what_does_not_compute_imports_without_what_computes(absent: list[str], modules: str) -> None:
    program = f"import sys; sys.modules.update(dict.fromkeys({absent}))\nimport {modules}"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_the_lock_names_hashes_and_no_host() -> None:
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        text = lock.read_text()
        assert "--hash=sha256:" in text, lock.name
        assert "--index-url" not in text
        assert "://" not in text, lock.name
