"""Keeping the cluster as InferenceServices want it: when to look, and what a look is. Start with `reconciler.py`."""
