"""A load generator that nobody here wrote, guidellm, and `sluice bench`: the same load on the same service, in turn.

It runs unchanged against the gate's port (its own check of the server included), and both must tell the same: a closed
loop of eight clients over the same prompts, answers of exactly 48 tokens, temperature 0, medians of the rounds. The
service has one half of the cores and the generators the other: a generator that computes more slows no engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from demo_pod import demo_service, ready_pod
from peer_install import folder, install_guidellm
from report import Bar, Report, arguments
from sluice_operator.bench import prompts

SERVICE = demo_service("harness", cache={"capacity": "384Mi", "prefixCaching": "Disabled"})
CLIENTS, TOKENS = 8, 48
# How guidellm names what `sluice bench` measures; the mean gap of an answer is its inter-token latency.
FIGURES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_mean_ms", "itl_mean_ms", "latency_mean_ms")


async def ours(url: str, model: str, file: Path, requests: int) -> dict[str, float]:
    """The figures of `sluice bench`."""
    sluice = str(Path(sys.executable).with_name("sluice"))
    load = f"--clients {CLIENTS} --requests {requests} --max-tokens {TOKENS} --ignore-eos --json"
    found = json.loads(await _output([sluice, "bench", url, "--model", model, "--prompts", str(file), *load.split()]))
    return {
        "requests": found["whole"],
        "output_tokens_per_s": found["output_tokens_per_s"],
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "ttft_mean_ms": found["ttft_ms"]["mean"],
        "itl_mean_ms": found["itl_ms"]["mean"],
        "latency_mean_ms": found["latency_ms"]["mean"],
    }


async def theirs(program: Path, url: str, model: str, file: Path, requests: int) -> dict[str, float]:
    """The figures of guidellm."""
    out = file.with_name("guidellm.json")
    backend = f"kind=openai_http,target={url},model={model},max_tokens={TOKENS}"
    load = f"--profile kind=concurrent,streams={CLIENTS} --constraint kind=max_requests,count={requests}"
    files = ["--data", f"kind=json_file,path={file}", "--output", f"kind=json,path={out}"]
    command = [str(program), "run", "--disable-console", "--backend", backend, *load.split(), *files]
    # It would ask a hub for nothing that it needs here.
    await _output(command, environment={"HF_HUB_OFFLINE": "1"})
    benchmark: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]
    names = ("output_token_count", "time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    done = {name: benchmark["metrics"][name]["successful"] for name in names}
    answers = benchmark["requests"]["successful"]
    # Its own rate is a mean over the moments of the run; tokens over the time that all of it took is what ours is.
    took_s = max(one["info"]["timings"]["request_end"] for one in answers) - min(
        one["info"]["timings"]["request_start"] for one in answers
    )
    return {
        "requests": len(answers),
        "output_tokens_per_s": round(len(answers) * done["output_token_count"]["mean"] / took_s, 1),
        "ttft_p50_ms": round(done["time_to_first_token_ms"]["median"], 2),
        "ttft_mean_ms": round(done["time_to_first_token_ms"]["mean"], 2),
        "itl_mean_ms": round(done["inter_token_latency_ms"]["mean"], 2),
        "latency_mean_ms": round(done["request_latency"]["mean"] * 1000, 2),
    }


async def _output(command: list[str], environment: dict[str, str] | None = None) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=os.environ | (environment or {})
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with status {process.returncode}")
    return out


async def measure(program: Path, rounds: int, requests: int) -> dict[str, list[dict[str, float]]]:
    cores = sorted(os.sched_getaffinity(0))
    runs: dict[str, list[dict[str, float]]] = {"sluice bench": [], "guidellm": []}
    with tempfile.TemporaryDirectory() as scratch:
        os.sched_setaffinity(0, cores[: max(1, len(cores) // 2)])
        async with ready_pod(SERVICE) as pod:
            os.sched_setaffinity(0, cores[len(cores) // 2 :])  # the programs that are started from here on
            for number in range(rounds + 1):
                file = Path(scratch) / f"prompts-{number}.jsonl"
                texts = itertools.islice(prompts.drawn(number, 32, 256), requests)
                file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
                pair = {
                    "sluice bench": await ours(pod.url, "harness", file, requests),
                    "guidellm": await theirs(program, pod.url, "harness", file, requests),
                }
                if number == 0:
                    continue  # warm-up
                print(f"  {pair}", flush=True)
                for name, row in pair.items():
                    runs[name].append(row)
    return runs


def main() -> int:
    args = arguments(__doc__ or "")
    program = install_guidellm(folder())
    requests = 16 if args.quick else 64
    runs = asyncio.run(measure(program, 1 if args.quick else 3, requests))
    report = Report("harness")
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in runs.items()
    }
    report.data = dict(medians)
    own, other = medians["sluice bench"], medians["guidellm"]
    report.bars = [
        Bar("guidellm: requests that failed", requests - other["requests"], "", 0, "lower"),
        *(Bar(f"{name}: apart by", 100 * abs(own[name] / other[name] - 1), "%", 10, "lower") for name in FIGURES),
    ]
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
