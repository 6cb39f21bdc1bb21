"""HTTP below the routes: connections, heads, bodies and streams, and their limits. Start with `listener.py`."""
