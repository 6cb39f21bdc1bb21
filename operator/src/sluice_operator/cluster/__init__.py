"""The way to the API server and the gates: connection, watches, Lease. Start with `asked.py`, then `kube.py`."""
