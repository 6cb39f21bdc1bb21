"""What is inside the engine, what it will hold, and whether one more fits: pure. Start with `room.py`."""
