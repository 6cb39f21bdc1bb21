"""Builds and runs the real Kubernetes node of the cluster tests: `python tests/cluster/node.py --help`."""

import argparse
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, it finds its parts where pytest finds them

from cluster.testnode import boot, box, command, definitions, images, monitoring, packages, programs, store, wheels
from cluster.testnode.errors import Missing, NodeError
from cluster.testnode.progress import Progress


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.py", description=__doc__)
    parser.add_argument(
        "--or-skip",
        action="store_true",
        help="exit 0 where this machine cannot run the node; with CI=true that is still a failure",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="build what is not in the cache yet")
    run = verbs.add_parser("run", help="start the node, run a command beside it, leave nothing running")
    for verb in (build, run):
        verb.add_argument(
            "--beside",
            action="store_true",
            help="also the programs that clusters run beside Sluice, such as KEDA: the full tests need them",
        )
    run.add_argument("--dual-stack", action="store_true", help="give node, pods and services IPv6 addresses too")
    run.add_argument(
        "command", nargs="+", metavar="COMMAND", help="put -- before it; KUBECONFIG and PATH are set for it"
    )
    inside = verbs.add_parser("inside")
    inside.add_argument("folder", type=Path)
    inside.add_argument("command", nargs="+")
    return parser.parse_args()


def _build(progress: Progress, *, beside: bool) -> tuple[list[Path], Path, Path]:
    """The folders of programs, the image store and the folder with torch, built where they are not cached."""
    modules = (*programs.ALL, *(programs.BESIDE if beside else ()))
    box.check_machine()
    packages.ensure(progress, packages.NEEDED | (packages.BESIDE if beside else {}))
    monitoring.ensure(progress)  # found in the cache by the tests, which cannot reach a registry
    for wanted in definitions.ALL:
        definitions.ensure(progress, wanted)
    with ThreadPoolExecutor(max_workers=2) as pool:  # downloads fill the pauses of the compiler, and back
        building = pool.submit(lambda: [programs.ensure(progress, module) for module in modules])
        laying = pool.submit(lambda: (wheels.torch_folder(progress), images.ensure(progress)))
        try:
            torch, layouts = laying.result()
            folders = building.result()
        except BaseException:
            command.stop_all()
            raise
    found = dict(zip((module.name for module in modules), folders, strict=True))
    layouts.append(images.pause(found["pause"] / "pause"))
    return folders, store.ensure(progress, found["containerd"], layouts), torch


def main() -> int:
    """What the command line asks for: an exit code, and one line for every expected trouble."""
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if asked.verb == "inside":
            return boot.main(asked.folder, asked.command)
        folders, unpacked, torch = _build(Progress(sys.stderr), beside=asked.beside)
        if asked.verb == "build":
            return 0
        inside = [sys.executable, __file__, "inside"]
        return box.run(inside, asked.command, folders, unpacked, torch, dual_stack=asked.dual_stack)
    except Missing as lack:
        skipped = asked.or_skip and os.environ.get("CI") != "true"
        print(f"node: {'skipped: ' if skipped else ''}this machine lacks {lack}", file=sys.stderr)
        return 0 if skipped else 2
    except NodeError as error:
        print(f"node: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("node: interrupted; what was built whole is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
