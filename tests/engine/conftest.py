"""Nothing is timed: on a loaded machine an example may take long."""

from __future__ import annotations

import os

# Before anything imports triton: its kernels run in its interpreter, on the CPU. Nothing else here uses them.
os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
