"""One step of the model: its inputs, layers, caches and samples, on whatever device torch has."""
