"""What others compute of `gpu_check`'s model, where they are installed: speeds beside the engine's own."""

from __future__ import annotations

import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

from gpu_load import OUTPUT_TOKENS, prompt, requests
from gpu_weights import Shape


def transformers_peer(path: Path, shape: Shape, *, on_gpu: bool, quick: bool) -> dict[str, Any]:
    """Plain transformers over the same weights, greedy, static batches."""
    if importlib.util.find_spec("transformers") is None:
        return {"left out": "transformers is not installed"}
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    dtype = torch.bfloat16 if on_gpu else torch.float32
    device = "cuda" if on_gpu else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    new = 8 if quick else OUTPUT_TOKENS
    answers = {}
    for batch in (1, 4) if quick else (1, 16, 64):
        ids = torch.tensor([prompt(i, 32 if quick else 320, shape) for i in range(batch)], device=device)
        times = []
        for _ in range(2):
            begun = time.monotonic()
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
            times.append(time.monotonic() - begun)
        answers[str(batch)] = {"output_tokens_per_s": round(batch * new / min(times), 1)}
    return answers


def vllm_peer(path: Path, shape: Shape, *, on_gpu: bool) -> dict[str, Any]:
    """vLLM over the same weights, all requests at once."""
    if not on_gpu or importlib.util.find_spec("vllm") is None:
        return {"left out": "vllm is not installed, or there is no card"}
    vllm = importlib.import_module("vllm")  # it is no dependency: a type checker would not find it
    engine = vllm.LLM(str(path), skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_model_len=4096)
    params = vllm.SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, min_tokens=OUTPUT_TOKENS, detokenize=False)
    answers = {}
    for batch in (1, 16, 64, 256):
        given = [{"prompt_token_ids": request.tokens} for request in requests(batch, OUTPUT_TOKENS, shape)]
        begun = time.monotonic()
        engine.generate(given, params, use_tqdm=False)
        answers[str(batch)] = {"output_tokens_per_s": round(batch * OUTPUT_TOKENS / (time.monotonic() - begun), 1)}
    return answers
