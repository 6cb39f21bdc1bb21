"""Own CPU kernels for what torch does slowly in a decode step: C source, its build, and the calls.

`build` finds or makes the library and `block_types` says what blocks take, both without torch; `library` calls it with
tensors and knows nothing of the model. Without them the engine computes the same with torch's own operators.
"""
