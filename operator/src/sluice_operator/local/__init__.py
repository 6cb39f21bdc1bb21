"""One pod of a service without a cluster, as two local processes. Start with `pod.py`."""
