"""Readers of an engine's live state, one file an engine."""
