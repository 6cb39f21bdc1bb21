"""`make demo`: the CPU example as local processes, driven past its limits. Leaves nothing running."""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
from pathlib import Path

from drive import run
from sluice_operator.errors import OperatorError
from sluice_operator.local.pod import LocalPod
from sluice_operator.resource import manifest
from sluice_operator.resource.parsing import parse

EXAMPLE = Path(__file__).resolve().parents[1] / "crds" / "examples" / "demo-cpu.yaml"


def _indented(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ")


async def main() -> int:
    """0 when the promise was kept and nothing is still held afterwards."""
    task = asyncio.current_task()
    assert task is not None
    # Told to end, it leaves nothing running either.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    (body,) = manifest.read_file(str(EXAMPLE))
    spec = parse(body)
    print(f"{EXAMPLE.name}: starting engine and gate (the first time, the engine measures its step times)")
    async with LocalPod(spec) as pod:
        await pod.wait_ready(progress=lambda text: print(f"  {text}", flush=True))
        state = await pod.state()
        if state is not None and state.engine is not None and state.engine.derived is not None:
            derived = state.engine.derived
            print(
                f"  ready. Derived from the promise: {derived.chunk_ceiling_tokens} prefill tokens a step at the "
                "end of a long prompt (more at its start), "
                f"{derived.max_sequences} at once, {derived.kv_capacity_tokens:,} tokens of KV.\n"
            )
            if not derived.feasible:
                print(_indented(f"This machine cannot keep the promise now: {derived.reason}."))
                print("  What follows shows a service that refuses most; free the processor, or relax slo.")
        kept = await run(
            pod.url,
            pod.admin_url,
            spec.model.served_name,
            spec.live.slo.time_to_first_token_us / 1e6,
            spec.live.slo.inter_token_latency_us / 1e6,
        )
    if not kept:
        print("demo: the promise was not kept, or something was left behind: see above,", file=sys.stderr)
        print("and docs/troubleshooting.md, which has a line for it", file=sys.stderr)
    return 0 if kept else 1


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except asyncio.CancelledError:
        sys.exit(143)
    except OperatorError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(1)
