"""vLLM's and SGLang's flags against their own argument parsers: `make check-engine-flags` (6 GB, once).

Both programs are installed outside the repository, asked for their flags, and given every command line of
`foreign_scene.SPECS` to parse. The flags are kept in `engine_flags.json`, which the quick tests hold the renderer
against; `--write` rewrites it, for another version of theirs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = HERE / "engine_flags.json"


def asked(command: list[str], commands: list[list[str]]) -> dict[str, Any]:
    """What one of the parsers says."""
    done = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main() -> int:
    """Ask both; 1 where a command line is refused, or the flags are not those that are kept."""
    sys.path[:0] = [str(HERE.parent), str(ROOT / "benchmarks")]
    import foreign_scene  # noqa: PLC0415  # found only now
    import peer_install  # noqa: PLC0415  # likewise

    at = peer_install.folder()
    peer_install.install_vllm(at)
    sglang = peer_install.unpack_sglang(at)
    python, parsers = str(at / "vllm/bin/python"), HERE / "engine_parsers"
    commands = foreign_scene.commands()
    found = {
        "VLLM": asked([python, str(parsers / "vllm_parser.py")], commands["VLLM"]),
        "SGLang": asked([python, str(parsers / "sglang_parser.py"), str(sglang)], commands["SGLang"]),
    }
    problems = [f"{name}: {problem}" for name, one in found.items() for problem in one.pop("problems")]
    for problem in problems:
        print(problem, file=sys.stderr)
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if "--write" in sys.argv[1:]:
        KEPT.write_text(text, "utf-8")
    is_kept = KEPT.exists() and KEPT.read_text("utf-8") == text
    if not is_kept:
        print(f"{KEPT.name} has other flags than these programs: run with --write, and read the diff", file=sys.stderr)
    for name, one in found.items():
        flags = len(one["switches"]) + len(one["valued"])
        print(f"{name} {one['version']}: {flags} flags; takes {len(commands[name])} command lines of ours")
    return 1 if problems or not is_kept else 0


if __name__ == "__main__":
    sys.exit(main())
