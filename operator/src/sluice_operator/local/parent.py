"""What a local program owes to the process that started it: not to outlive it.

A parent that is killed cannot end anybody. On Linux the kernel can; elsewhere the programs stay.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> Callable[[], None] | None:
    """What the child does between fork and exec, so that it is told to end when this process has died; None: nothing.

    The kernel goes by the thread that starts the child: it has to be one that lasts, as the main thread does.
    """
    if sys.platform != "linux":
        return None
    # Looked up here: a child of fork should do no more than call it.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it had died before we asked

    return ask
