"""Sluice's gate: the pod's only door.

Reading order: `config`, then a request's way: `server` (routes), `reception` (who asks, what it costs), `admission`
(the decision), `proxy` (to the engine and back). The decision asks `capacity/room` (does it fit: start with
`capacity/ledger`), `waiting/door` (whose turn it is), `retries` and `callers/quotas`; `estimates/pricing` says what a
request will cost, and `engines/sluice` reads the engine's live state. The packages `capacity`, `waiting` and `retries`,
`admission` and most of `estimates` and `telemetry` are pure: no clock, no I/O; the simulator runs them.
"""
