"""Sluice's gate: the pod's only door.

Reading order: `config`, `ledger` (what was let in), `estimate` (what a request will cost), `limits` (what fits),
`admission` (the decision), then `engines/sluice` (the engine's live state), `server` (a request's way to its permit)
and `proxy` (its way on). The files `config`, `errors`, `state`, `ledger`, `estimate`, `limits`, `measure`, `headers`,
`room` and `admission` are pure: no clock, no I/O; a simulator can run them.
"""
