"""Sluice's gate: the pod's only door.

Reading order: `config`, `ledger` (what was let in), `estimate` (what a request will cost), `admission` (the decision),
then `engines/sluice` (the engine's live state), `proxy` (one request's way through) and `server`. The files `config`,
`errors`, `state`, `ledger`, `estimate`, `limits` and `admission` are pure: no clock, no I/O; the simulator runs them too.
"""
