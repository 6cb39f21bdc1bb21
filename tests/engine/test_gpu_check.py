"""The script that checks a card works where only torch, NumPy and safetensors are installed; here on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    "aiohttp", "gguf", "httpx2", "huggingface_hub", "jinja2", "llguidance", "prometheus_client", "tokenizers",
    "transformers", "uvloop", "yaml",
)  # fmt: skip


@pytest.mark.slow
def test_the_check_of_a_card_runs_with_little_installed(tmp_path: Path) -> None:
    site = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in ABSENT)
    (tmp_path / "sitecustomize.py").write_text(site)
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [str(ROOT / "benchmarks/gpu_check.sh"), "--device", "cpu", "--quick"],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    data = document["data"]
    assert set(data["found"]["missing for serving"]) >= {"aiohttp", "tokenizers", "gguf"}
    assert data["correctness"]["Float32"]["same tokens"] > 0
    assert data["step_table"]["step_us"]
    assert all(row["output_tokens_per_s"] > 0 for row in data["load"].values())
    assert set(data["overlap"]) == {"0", "1", "2"}
    assert data["transformers"] == {"left out": "transformers is not installed"}
    assert data["left_out"] == []


def test_a_card_that_is_not_there_is_one_line() -> None:
    done = subprocess.run(
        [str(ROOT / "benchmarks/gpu_check.sh")],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "gpu_check: torch sees no GPU here; --device cpu --quick tries the script without one"
    ]
