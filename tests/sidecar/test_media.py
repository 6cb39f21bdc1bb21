"""What a message has beside text is priced, and learned from what answers say; of text it teaches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.foreign_server import ForeignServer
from sidecar.running import empty, running_gate
from sidecar.scripted_engine import live_config, ready_state
from sluice_engine.core.state import PoolState
from sluice_sidecar.capacity.cost import Cost
from sluice_sidecar.capacity.limits import Limits
from sluice_sidecar.engines import calibrate
from sluice_sidecar.estimates import estimate, fitting
from sluice_sidecar.estimates.media import START_TOKENS, MediaTokens, kind_of, without_media
from sluice_sidecar.estimates.pricing import Pricing

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TEXT = {"type": "text", "text": "what is this?"}


def limits(context: int = 100_000) -> Limits:
    pool = PoolState(block_tokens=16, total_blocks=context // 16, free_blocks=0)
    found = Limits.from_state(ready_state(max_length_tokens=context, pool=pool), live_config())
    assert found is not None
    return found


def body(*parts: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8, **fields}).encode()


def cost(pricing: Pricing, *parts: Any, exact: int | None = None, **fields: Any) -> Cost:
    return pricing.price(estimate.parse(body(*parts, **fields), "chat"), limits(), "a", exact)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (TEXT, None),
        ({"type": "refusal", "refusal": "no"}, None),
        ("text alone", None),
        ({"type": "text"}, None),  # the engine says that its text is missing
        (7, None),
        (None, None),
        ({}, None),
        (IMAGE, "image"),
        ({"type": "image_url"}, "image"),
        ({"image_url": "http://x/y.png"}, "image"),
        (AUDIO, "audio"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video"),
        ({"type": "file", "file": {"file_id": "f"}}, "file"),
        ({"type": "of tomorrow", "x": 1}, "file"),
        ({**IMAGE, "text": ""}, "image"),  # a word beside it makes no picture free
    ],
    ids=str,
)
def test_what_a_part_is(part: object, kind: str | None) -> None:
    assert kind_of(part) == kind


def test_each_part_is_priced_beside_the_text() -> None:
    text = cost(Pricing(), TEXT).prompt_tokens

    assert cost(Pricing(), TEXT, IMAGE).prompt_tokens == text + START_TOKENS["image"] == text + 1024
    assert cost(Pricing(), TEXT, IMAGE, IMAGE, AUDIO).prompt_tokens == text + 3 * 1024
    assert cost(Pricing(), {"type": "refusal", "refusal": TEXT["text"]}).prompt_tokens == text
    assert cost(Pricing(), {**IMAGE, "text": TEXT["text"]}).prompt_tokens == text + 1024


def test_an_estimate_alone_makes_no_prompt_impossible() -> None:
    asked = estimate.parse(body(TEXT, *[IMAGE] * 50), "chat")
    small = limits(2_000)

    assert fitting.refuse(asked, small) is None
    priced = Pricing().price(asked, small, "a", 40)
    assert small.unfit_reason(priced.prompt_tokens, 8) is None
    assert priced.prompt_tokens > 1_000


def test_what_the_text_does_not_explain_is_what_the_pictures_came_to() -> None:
    pricing = Pricing()
    for number in range(4):
        one = cost(pricing, TEXT, IMAGE, IMAGE)
        pricing.admitted(f"r{number}", one)
        text = cost(pricing, TEXT).prompt_tokens
        pricing.told(f"r{number}", text + 2 * 300, 5)

    assert cost(pricing, TEXT, IMAGE).prompt_tokens == cost(pricing, TEXT).prompt_tokens + 300
    assert pricing.media.tokens_of("audio") == 1024, "of sound nothing was said"


def test_pictures_teach_the_ratio_of_text_nothing_and_a_mixture_teaches_nothing() -> None:
    pricing = Pricing()
    long = {"type": "text", "text": "word " * 200}
    before = pricing.ratio.tokens_per_byte
    for number in range(20):
        parts = (long, IMAGE, AUDIO) if number % 2 else (long, IMAGE)
        pricing.admitted(f"r{number}", cost(pricing, *parts))
        pricing.told(f"r{number}", 5_000, 5)

    assert pricing.ratio.tokens_per_byte == before
    assert pricing.media.tokens_of("image") == 5_000 - (cost(pricing, long).prompt_tokens)
    assert pricing.media.tokens_of("audio") == 1024


def test_a_count_is_asked_of_the_text_alone_and_the_rest_stands_beside_it() -> None:
    sent = body(TEXT, IMAGE, model="m")
    asked = estimate.parse(sent, "chat")

    question = json.loads(estimate.tokenize_body(sent, asked))

    assert question == {"model": "m", "messages": [{"role": "user", "content": [TEXT]}]}
    assert Pricing().price(asked, limits(), "a", 77).prompt_tokens == 77 + 1024
    assert without_media([{"role": "user", "content": [IMAGE]}, 3]) == [{"role": "user", "content": ""}, 3]
    assert without_media("no list") == "no list"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-100, 50_000)), max_size=30))
def test_what_is_learned_lies_among_what_was_told(told: list[tuple[int, int]]) -> None:
    media = MediaTokens()
    for number, tokens in told:
        media.learn((("image", number),), tokens)

    each = [max(1.0, tokens / number) for number, tokens in told]
    assert len(told) < 4 or min(each) - 1 <= media.tokens_of("image") <= max(each) + 1
    assert media.tokens((("image", 3),)) == 3 * media.tokens_of("image") > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_before_another_engine_a_picture_costs_what_it_says_in_its_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    monkeypatch.setattr(calibrate, "LONG_WORDS", 40)
    message = {"role": "user", "content": [TEXT, IMAGE]}
    async with (
        ForeignServer().running() as server,
        running_gate(None, tmp_path, engine="vllm", engine_url=server.url) as gate,
    ):
        for _ in range(5):
            async with gate.post(messages=[message], max_tokens=8, stream=stream) as response:
                assert response.status == 200
                await response.read()
            await empty(gate.gate)

        told = len(str(server.bodies[-1]["messages"])) // 5
        first, *_, last = gate.gate.admission.decisions.last(5)
        # The whole context is 512 tokens: the start, 1,024, is taken for what fits.
        assert (first.prompt_tokens, server.bodies[-1]["messages"]) == (512 - 8, [message])
        assert last.prompt_tokens is not None
        assert told <= last.prompt_tokens < 200
