"""Sluice's engine: continuous batching over a paged KV cache.

Reading order: `config` (what an engine is told), `core/request` and `core/plan` (the nouns), `core/scheduler` (who runs
in a step), `core/loop` (schedule → run → update), `runner` (the step on a device), `service` (the thread that owns the
loop), `server` (HTTP). Everything under `core/` imports the standard library only, so that the gate, the operator and
the simulator use the very same classes.
"""
