"""Those who come back: which attempt it is, how many may, and when: pure. Start with `returning.py`."""
