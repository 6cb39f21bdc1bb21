"""The document that the service gives of itself, and a client that believes it: schemathesis, unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from api.conftest import nothing_left
from sidecar.running import RunningGate
from sluice_engine.protocol.chat import parse_chat
from sluice_engine.protocol.openapi import document

# What may fail for reasons that no schema says: ids that the model has, fields that exclude each other.
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "negative_data_rejection", "unsupported_method",
)  # fmt: skip


def test_every_field_of_the_document_is_one_that_the_parser_reads() -> None:
    schemas = document("m", "1")["components"]["schemas"]
    base = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    for name in schemas["ChatRequest"]["properties"]:
        parse_chat(json.dumps({name: None, **base}).encode())
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schemas))) <= schemas.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
async def test_a_client_that_believes_the_document_finds_no_fault(gate: RunningGate, tmp_path: Path, mode: str) -> None:
    phases = "coverage,fuzzing" if mode == "negative" else "fuzzing"
    report = tmp_path / "report"
    checks = [check for check in CHECKS if mode == "negative" or check != "negative_data_rejection"]
    with report.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", f"{gate.url}/openapi.json",
            "--checks", ",".join(checks), "--mode", mode, "--max-examples", "10", "--seed", "7",
            "--phases", phases, "--no-color", "--generation-database", "none",
            "--continue-on-failure", "--suppress-health-check", "all", "--request-timeout", "60",
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(Path(__file__).parent)},
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        status = await process.wait()
    text = report.read_text()

    assert status == 0, text[-6000:]
    assert re.search(r"[1-9][0-9]* generated", text) or "passed" in text, text[-2000:]
    await nothing_left(gate)
    state: Any = gate.gate.engine.state
    assert state.phase == "ready"
