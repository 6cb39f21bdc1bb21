"""`sluice bench`: what clients of a server see under a load, and how much of it kept a promise."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from sluice_operator.bench import prompts
from sluice_operator.bench.answers import Answer, Figures, Promise, Spread, figures
from sluice_operator.bench.clients import Asked, Clients, server_url
from sluice_operator.cli.numbers import Duration, Number
from sluice_operator.errors import InvalidSettings

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([^\r\n]*)")


@click.command()
@click.argument("url", metavar="URL")
@click.option("--model", default="", metavar="NAME", help="Left out, the first that the server lists.")
@click.option(
    "--clients", type=click.IntRange(1, 4096), metavar="N", help="A closed loop: so many at once. [default: 8]"
)
@click.option(
    "--rate", type=Number(0.001, 10_000), metavar="R", help="Instead: R requests a second, at random moments."
)
@click.option("--requests", type=click.IntRange(1, 10_000_000), metavar="N", help="Requests in all. [default: 64]")
@click.option("--seconds", type=Number(0.1, 86_400), metavar="S", help="Instead: begin requests for so long.")
@click.option(
    "--prompt-words", default="32-256", show_default=True, metavar="LOW-HIGH", help="Words of a prompt, drawn evenly."
)
@click.option(
    "--prompts", "prompt_file", type=click.Path(path_type=Path), metavar="FILE",
    help="Instead: a prompt a line, or a JSON object with `prompt`.",
)  # fmt: skip
@click.option(
    "--max-tokens", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Of each answer."
)
@click.option("--ignore-eos", is_flag=True, help="Answers of exactly that many, where the server knows vLLM's field.")
@click.option("--temperature", type=Number(0, 2), default=0.0, show_default=True, metavar="T")
@click.option(
    "--ttft", "ttft_us", type=Duration(), metavar="2s", help="The promise of a first token, for every prompt."
)
@click.option("--itl", "itl_us", type=Duration(), metavar="150ms", help="The promise of each answer's own gaps.")
@click.option(
    "--percent", type=Number(50, 100), default=99.0, show_default=True, metavar="P",
    help="Share of an answer's gaps within --itl, and of the requests that have to be good.",
)  # fmt: skip
@click.option(
    "--retries", type=click.IntRange(0, 100), default=2, show_default=True, metavar="N",
    help="How often a refused request comes back when it was told to.",
)  # fmt: skip
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="Sent with every request.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def bench(  # noqa: PLR0913  # click's way: an argument an option
    url: str,
    *,
    model: str,
    clients: int | None,
    rate: float | None,
    requests: int | None,
    seconds: float | None,
    prompt_words: str,
    prompt_file: Path | None,
    max_tokens: int,
    ignore_eos: bool,
    temperature: float,
    ttft_us: int | None,
    itl_us: int | None,
    percent: float,
    retries: int,
    headers: tuple[str, ...],
    seed: int,
    as_json: bool,
) -> int:
    """Load a server, and print what its clients saw.

    URL is any server that speaks OpenAI's chat API, without a route, as http://127.0.0.1:8080. Its key, where it asks
    for one, is taken from the environment: OPENAI_API_KEY. Ctrl-C ends the load and prints what there is.

    Exit codes: 0 measured; 1 nothing was answered, or fewer good than --percent where --ttft and --itl are given;
    2 wrong usage, or no list of models where --model is left out.
    """
    if clients is not None and rate is not None:
        raise InvalidSettings("--clients and --rate are two kinds of load: give one")
    if requests is not None and seconds is not None:
        raise InvalidSettings("--requests and --seconds both end the load: give one")
    if (ttft_us is None) != (itl_us is None):
        raise InvalidSettings("a promise has two parts: give both --ttft and --itl")
    promise = None if ttft_us is None or itl_us is None else Promise(ttft_us=ttft_us, itl_us=itl_us, percent=percent)
    asked = Asked(
        model=model,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        retries=retries,
        headers=_headers(headers),
    )
    texts = prompts.read(prompt_file) if prompt_file else prompts.drawn(seed, *_words(prompt_words))
    texts = _until(texts, seconds) if seconds is not None else itertools.islice(texts, requests or 64)
    seen: list[Answer] = []
    took_s = asyncio.run(_load(server_url(url), asked, texts, clients or 8, rate, seed, seen))
    found = figures(seen, took_s, promise)
    click.echo(json.dumps(asdict(found)) if as_json else "\n".join(_lines(found, promise)))
    return 0 if found.whole and (found.good is None or found.good * 100 >= percent * found.requests) else 1


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    for one in given:
        if not (match := _HEADER.fullmatch(one)):
            raise InvalidSettings(f"--header: {one!r} is not NAME: VALUE")
        headers[match[1]] = match[2]
    return headers


def _words(text: str) -> tuple[int, int]:
    if not (match := _RANGE.fullmatch(text)) or not 1 <= (low := int(match[1])) <= (high := int(match[2])):
        raise InvalidSettings(f"--prompt-words: {text!r} is not LOW-HIGH, as 32-256")
    return low, high


def _until(texts: Iterator[str], seconds: float) -> Iterator[str]:
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, texts)


async def _load(  # all that a load is
    url: str, asked: Asked, texts: Iterator[str], clients: int, rate: float | None, seed: int, seen: list[Answer]
) -> float:
    """Run the load; the seconds it took. Ctrl-C ends it as if the prompts had ended, but for what is on its way."""
    rng = random.Random(seed)  # noqa: S311  # moments, no secrets
    async with Clients(url, asked) as group:
        if not asked.model:
            group.model = await group.first_model()
        running = asyncio.ensure_future(
            group.closed_loop(texts, clients, seen) if rate is None else group.open_loop(texts, rate, rng, seen)
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
        started = time.monotonic()
        await asyncio.wait([running])
        took_s = time.monotonic() - started
        if not running.cancelled():
            running.result()
        return took_s


def _lines(found: Figures, promise: Promise | None) -> Iterator[str]:
    again = f", {found.attempts} attempts" if found.attempts > found.requests else ""
    yield f"{found.whole} of {found.requests} requests answered in {found.seconds:.1f} s{again}"
    for what, counts in (("refused", found.refused), ("failed", found.failed)):
        if counts:
            yield f"{what:<14}" + ", ".join(f"{count} {code}" for code, count in sorted(counts.items()))
    yield (
        f"{'a second':<14}{found.requests_per_s:.2f} requests, {found.output_tokens_per_s:.1f} output tokens, "
        f"{found.prompt_tokens_per_s:.1f} prompt tokens"
    )
    if found.uncounted:
        yield f"{'':<14}{found.uncounted} answers came without their tokens' number: an event counts as one"
    rows: list[tuple[str, Spread | None]] = [
        ("first token", found.ttft_ms),
        ("gaps", found.gap_ms),
        ("token to token", found.itl_ms),
        ("whole answer", found.latency_ms),
    ]
    yield f"{'ms':<14}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max"))
    for name, spread in rows:
        if spread is not None:
            yield f"{name:<14}" + "".join(f"{value:>10.1f}" for value in asdict(spread).values())
    if promise is not None:
        share = 100 * (found.good or 0) / max(1, found.requests)
        yield (
            f"good          {found.good} of {found.requests} ({share:.1f} %): first token within "
            f"{promise.ttft_us / 1000:g} ms, {promise.percent:g} % of its gaps within {promise.itl_us / 1000:g} ms"
        )
