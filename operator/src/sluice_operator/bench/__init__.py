"""A load generator for any server that speaks OpenAI's chat API: what `sluice bench` and the benchmarks are made of."""
