"""What can be read of the gate: decisions, measures, signals, metrics, spans. Start with `recorder.py`."""
