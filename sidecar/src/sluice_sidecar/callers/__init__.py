"""Who asks, whose word is taken for it, and what they may use. Start with `identity.py`."""
