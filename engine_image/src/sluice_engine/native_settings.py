"""What the native libraries under torch are told by the environment, which they read once, as they begin.

Must be applied before torch is imported. Whoever runs the process and sets one of these knows better.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# Turns that OpenMP's threads spin for more work, some 100 ns each, before they sleep. libgomp's own 300,000 outlast the
# pause between steps many times over, so that idle threads would hold cores that this process's streams, the gate and
# the clients wait for. A millisecond still outlasts what lies between the operators of a step.
_SPIN_COUNT = "10000"

# A product is prepared for its shape, and torch and oneDNN each keep what they prepared for the last so many: 1,024
# where nothing is said. In bfloat16 each is a quarter to a third of a megabyte. Steps are of every size, so an engine
# would come to hold hundreds of megabytes of them. A model has four to six shapes of weights: these are the batches of
# twenty sizes. What is prepared again costs about 0.4 ms of a step, once for all layers.
_PREPARED_PRODUCTS = "128"
_KEPT_BY = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
NAMES = ("GOMP_SPINCOUNT", *_KEPT_BY)


def apply(environment: MutableMapping[str, str]) -> None:
    """Set what nobody has set."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    for name in _KEPT_BY:
        environment.setdefault(name, _PREPARED_PRODUCTS)
