"""Finds the kernels' shared library, or builds it: once a machine, into the user's cache.

Owns where libraries lie and how the compiler is called. A library that came with the package (an image has one where a
compiler was there when it was built) goes first. As a program, `python build.py DIRECTORY` leaves one there. Only the
standard library is imported, so that an image can be built before torch is in it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
INCLUDED = tuple(SOURCE.with_name(name) for name in ("attention_rows.h", "integer_products.h", "layers.h"))
"""What the source takes in."""


@dataclass(frozen=True, slots=True)
class Level:
    """What registers a library is compiled for."""

    name: str
    """As people call it."""
    march: str
    """As the compiler calls it."""
    needed_flags: frozenset[str]
    """Of a processor, in Linux's words."""

    def library(self, element: str) -> str:
        """The file's name."""
        return f"kernels-{self.march}-{element}.so"


_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
LEVELS = (
    Level("avx512", "x86-64-v4", _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    Level("avx2", "x86-64-v3", _AVX2),
)
"""Widest first."""

# One library for each type of activations and cache, and what the compiler is told for it.
ELEMENTS: dict[str, tuple[str, ...]] = {"float32": (), "bfloat16": ("-DBFLOAT16",)}
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-fopenmp")
_BUILD_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Found:
    """A library, and where it is from."""

    path: Path
    level: Level
    origin: str
    """`prebuilt` or `built`."""


def find_or_build(cpu_flags: frozenset[str], element: str, only: str | None = None) -> Found | str:
    """The library for this machine and type of elements (one of `ELEMENTS`), or why there is none.

    `only`: the name of the one level that may be taken.
    """
    levels = [level for level in LEVELS if only in {None, level.name}]
    level = next((level for level in levels if level.needed_flags <= cpu_flags), None)
    if level is None:
        return f"the processor lacks {', '.join(sorted(levels[-1].needed_flags - cpu_flags))}"
    if (beside := SOURCE.with_name(level.library(element))).is_file():
        return Found(beside, level, "prebuilt")
    compiler = shutil.which("cc")
    if compiler is None:
        return "no C compiler (cc) is installed"
    try:
        target = _cache_directory() / _digest(compiler) / level.library(element)
        if not target.is_file():
            compile_into(compiler, level, element, target)
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines() or [f"exit status {error.returncode}"]
        return f"{compiler} failed: {lines[0]}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"the kernels could not be built: {error}"
    return Found(target, level, "built")


def compile_into(compiler: str, level: Level, element: str, target: Path) -> None:
    """Build the library; whoever builds at the same time, the file is whole once it has its name.

    Raises:
        subprocess.CalledProcessError: the compiler does not take the source; its words are in `stderr`.
        subprocess.TimeoutExpired: the compiler does not end.
        OSError: the directory cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *_FLAGS, f"-march={level.march}", *ELEMENTS[element], str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_LIMIT_S)  # noqa: S603
        made.replace(target)


def _cache_directory() -> Path:
    """Raises RuntimeError for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sluice" / "kernels"


def _digest(compiler: str) -> str:
    """Differs wherever the library might: by source, options and compiler. The processor's part is the file's name."""
    told = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_BUILD_LIMIT_S)  # noqa: S603
    words = b"".join(file.read_bytes() for file in (SOURCE, *INCLUDED)) + " ".join(_FLAGS).encode() + told.stdout
    return hashlib.sha256(words).hexdigest()[:16]


def main(directory: str) -> int:
    """Build into a directory where that can be done; the exit status is 0 either way, for the kernels are optional."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("kernels: none: no C compiler (cc) is installed")  # noqa: T201  # a program's answer
        return 0
    try:
        for level, element in itertools.product(LEVELS, ELEMENTS):
            compile_into(compiler, level, element, Path(directory) / level.library(element))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"kernels: none: {error}: {getattr(error, 'stderr', '')}")  # noqa: T201  # likewise
    else:
        print(f"kernels: built into {directory}")  # noqa: T201  # likewise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
