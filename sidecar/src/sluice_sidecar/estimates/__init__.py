"""What a request will cost, before it has. Start with `pricing.py`; `counting.py` alone asks the engine."""
