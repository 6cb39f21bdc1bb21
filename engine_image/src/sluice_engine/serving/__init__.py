"""What the engine's socket answers: the API's routes, what a call produces, live state and metrics."""
