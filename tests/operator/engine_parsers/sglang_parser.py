"""SGLang's own argument parser, run by vLLM's Python, which has torch: its flags, and whether it takes command lines.

As `vllm_parser.py`. What SGLang imports and this Python lacks (kernels, notebooks) is put up as an empty module: no
flag depends on it.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parent))


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what SGLang's own files ask for and nobody else has found."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        top = fullname.partition(".")[0]
        if top == "sglang" or not ("/sglang/" in frame.f_code.co_filename or top in self._names):
            return None
        self._names.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    folder = sys.argv[1]
    sys.path.insert(0, folder)
    sys.meta_path.append(Absent())
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]  # noqa: PLC0415  # unpacked there
    from vllm_parser import flags_of, problems_of  # type: ignore[import-not-found]  # noqa: PLC0415  # beside this file

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    problems = problems_of(parser, json.load(sys.stdin))
    (version,) = [one.version for one in distributions(path=[folder]) if one.metadata["Name"] == "sglang"]
    print(json.dumps({"version": version, **flags_of(parser), "problems": problems}))


if __name__ == "__main__":
    main()
