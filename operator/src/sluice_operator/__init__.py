"""Sluice's Kubernetes operator and the `sluice` command.

Reading order: `spec` (what is wanted), `files`, `pod_template` and `render` (what it becomes), `plan` (what to send),
`status` with `pods` and `figures` (what to tell); these are pure. `reconcile` runs them for each service; `kube` alone
talks to the API server, `handlers` and `watches` only say when to look. `local` runs one pod without a cluster; `cli`
is the command.
"""
