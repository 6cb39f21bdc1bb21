"""What every test needs of the process it runs in."""

from __future__ import annotations

import signal

# A shell's background job ignores SIGINT, and so would every program that a test starts and ends with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
