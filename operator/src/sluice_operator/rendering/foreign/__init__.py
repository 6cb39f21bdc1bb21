"""Other engines behind the same gate: what of a spec becomes their flags, and what they cannot honour.

`runtime.py` first; `vllm.py` and `sglang.py` have one engine each, `honoured.py` what neither can do. Pure, all of it.
"""
