"""The simulator: the engine's own scheduler and the gate's own admission under a virtual clock.

It owns time (`events`), what arrives (`workload`, `traces`), how clients behave (`clients`), and what a step takes
(`executor`). Every decision is made by the very classes that run in a pod: `sluice_engine.core` and the gate's pure
files; there is no second copy of either. It must not know torch, sockets or a real clock.
Start reading at `run.run`.
"""
