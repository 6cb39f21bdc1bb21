"""A client cannot tell from an error's body which of the two programs wrote it: one table over both."""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from engine.serving import served
from sidecar.running import running_gate
from sidecar.scripted_engine import ScriptedEngine
from sluice_engine.errors import RequestError, sentence
from sluice_sidecar.errors import Reason, Refusal

_SENTENCE = re.compile(r"[A-Z].*\.", re.DOTALL)


@pytest.fixture
async def doors() -> AsyncIterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        async with (
            served() as engine,
            ScriptedEngine(Path(folder) / "engine.sock").running() as behind,
            running_gate(behind, Path(folder)) as gate,
        ):
            yield {"engine": engine.url, "gate": gate.url, "admin": gate.admin_url}


@pytest.mark.parametrize("door", ["engine", "gate"])
@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        pytest.param("GET", "/v2", b"", "not_found", id="no-such-route"),
        pytest.param("GET", "/v1/completions", b"", "method_not_allowed", id="another-method"),
        pytest.param("POST", "/v1/completions", b"{", "invalid_json", id="half-a-body"),
        pytest.param("POST", "/v1/completions", b"\xff", "invalid_json", id="not-utf-8"),
        pytest.param("POST", "/v1/completions", b"[1]", "invalid_json", id="a-list"),
        pytest.param("POST", "/v1/completions", b"\xef\xbb\xbf{}", "invalid_json", id="a-byte-order-mark"),
        pytest.param("POST", "/v1/completions", b'{"seed": 1%s}' % (b"0" * 4300), "invalid_json", id="4301-digits"),
        pytest.param("POST", "/v1/completions", b'{"prompt": %s}' % (b"[" * 200_000), "invalid_json", id="too-much"),
        pytest.param("POST", "/v1/completions", b'{"prompt": %s}' % (b"[" * 2_000), "invalid_json", id="too-deep"),
        pytest.param(
            "POST",
            "/v1/completions",
            b'{"model": "tiny", "prompt": "x", "max_tokens": 99999}',
            "context_length_exceeded",
            id="too-long",
        ),
    ],
)
async def test_both_doors_refuse_in_one_shape(
    doors: dict[str, str], door: str, method: str, path: str, body: bytes, code: str
) -> None:
    async with aiohttp.ClientSession() as client, client.request(method, doors[door] + path, data=body) as response:
        document = await response.json()
        request_id = response.headers.get("x-sluice-request-id")

    assert document.keys() == {"error"}
    error = document["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert _SENTENCE.fullmatch(error["message"])
    assert (request_id is not None) == (method == "POST"), "an answer to a request names it in its headers"


async def test_the_steps_refuse_alike(doors: dict[str, str]) -> None:
    async with aiohttp.ClientSession() as client, client.get(f"{doors['engine']}/steps?last=x") as response:
        error = (await response.json())["error"]

    assert error["message"] == "Invalid 'last': must be 1 to 4096."


@pytest.mark.parametrize("kind", RequestError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_engine_is_a_sentence(kind: type[RequestError]) -> None:
    error = kind("the body is odd").body()["error"]

    assert error["message"] == "The body is odd."
    assert list(error) == list(Refusal(Reason.SLOTS, "Busy.").body()["error"])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("the model is not here", "The model is not here."),
        ("Is it?", "Is it?"),
        ("done. ", "Done."),
        ("", "."),
    ],
)
def test_a_sentence_begins_and_ends(text: str, written: str) -> None:
    assert sentence(text) == written


def test_every_refusal_that_the_gate_writes_is_a_sentence() -> None:
    """Its words stand in the sources, next to their reason."""
    sources = Path(__file__).parents[2] / "sidecar" / "src" / "sluice_sidecar"
    texts = re.compile(r'Refusal\(\s*Reason\.[A-Z_]+,\s*f?"((?:[^"\\]|\\.)*)"', re.DOTALL)
    found = [text for file in sorted(sources.rglob("*.py")) for text in texts.findall(file.read_text("utf-8"))]

    assert len(found) > 15
    assert [text for text in found if not re.match(r"[A-Z]", text) or not text.endswith((".", "}"))] == []
