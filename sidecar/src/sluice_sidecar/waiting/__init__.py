"""Who waits at the door, and in which order they are looked at: pure. Start with `door.py`."""
