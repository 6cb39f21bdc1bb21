"""What is told of a service: conditions, numbers, events, and the command's answer. Pure. Start with `status.py`."""
