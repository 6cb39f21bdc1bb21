"""Sluice's Kubernetes operator and the `sluice` command.

Reading order: `resource/spec` (what is wanted), `rendering/render` (what it becomes), `plan` (what to send),
`observed/pods` (what is there) and `status/status` (what to tell); these are pure. `reconcile/` runs them for each
service; `cluster/kube` alone talks to the API server, `handlers` and `cluster/watches` only say when to look. `local`
runs one pod without a cluster; `cli` is the command, `records` what it makes of what a pod recorded.
"""
