"""The engine's own metrics page as it is passed on beside the gate's: without what both processes have.

Pure. Must not know what the numbers mean.
"""

from __future__ import annotations


def without_process_metrics(page: bytes) -> bytes:
    """A Prometheus page without the `process_*` and `python_*` families: the gate's own would collide."""
    kept = []
    for line in page.splitlines(keepends=True):
        name = line.split(maxsplit=3)[2] if line.startswith((b"# HELP ", b"# TYPE ")) and line.count(b" ") > 2 else line
        if not name.startswith((b"process_", b"python_")):
            kept.append(line)
    return b"".join(kept)
