"""The golden files of the renderer: `python tests/operator/golden.py --write` rewrites them (`make golden`)."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "golden"


def rendered() -> dict[str, str]:
    """File name → what it has to hold."""
    import operator_scene as scene  # noqa: PLC0415  # found only once the path is set, when this runs as a script
    from sluice_operator.cli.render import to_yaml  # noqa: PLC0415  # likewise
    from sluice_operator.rendering.render import objects  # noqa: PLC0415  # likewise

    specs = {
        name: scene.example(name)
        for name in ("minimal", "full", "demo-cpu", "model-on-a-claim", "hugging-face", "vllm", "sglang")
    }
    specs["autoscaled"] = scene.spec({"autoscaling": {"minReplicas": 2, "maxReplicas": 6}})
    specs["in-place"] = scene.spec({"rollout": {"strategy": "InPlace", "drainTimeout": "1500ms"}})
    return {
        f"{name}.yaml": to_yaml(list(objects(one, scene.IMAGES, surroundings=scene.EVERYTHING)))
        for name, one in specs.items()
    }


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    wanted = rendered()
    held = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.yaml")}
    stale = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
    if "--write" in sys.argv[1:]:
        FOLDER.mkdir(exist_ok=True)
        for name in held.keys() - wanted.keys():
            (FOLDER / name).unlink()
        for name, text in wanted.items():
            (FOLDER / name).write_text(text, "utf-8")
    elif stale:
        sys.exit(f"golden files differ: {', '.join(stale)}; `make golden` rewrites them")
