"""Each family of models, from either kind of file, with kernels and without: what it says equals transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.gguf_file import make_gguf, round_like
from engine.reference import Reference, greedy, load_runner, outputs, run
from sluice_engine.compute.device import cpu_flags
from sluice_engine.config import ModelSource
from sluice_engine.kernels.library import SWITCH, load_kernels
from sluice_engine.model_files.weights import open_tensors
from tiny_model import make_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Head dimension 16: what kernels compute with.
SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
needs_kernels = pytest.mark.skipif(
    isinstance(load_kernels(cpu_flags(), torch.float32), str),
    reason="no kernels here: another processor, or no compiler",
)

FAMILIES = [
    pytest.param("llama", {"config": {"rope_scaling": LLAMA3}}, {}, id="Llama 3"),
    pytest.param(
        "llama",
        {"config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        id="Llama, linear",
    ),
    pytest.param("llama", {"config": {"attention_bias": True, "mlp_bias": True}}, {}, id="Llama with biases"),
    pytest.param("llama", {"config": {"rms_norm_eps": 0.3}}, {}, id="Llama, epsilon"),
    pytest.param("mistral", {"config": {"sliding_window": None}}, {}, id="Mistral"),
    pytest.param("mistral", {"config": {"sliding_window": 24}}, {"attention.sliding_window": 24}, id="Mistral, window"),
    pytest.param("mistral", {"head_dim": 32}, {}, id="Mistral, heads wider than the model"),
    pytest.param("qwen2", {}, {}, id="Qwen2"),
    pytest.param("qwen2", {"tied_head": False}, {}, id="Qwen2 with a head of its own"),
    pytest.param(
        "qwen2",
        {"config": {"rope_scaling": YARN, "max_position_embeddings": 256}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        id="Qwen2, YaRN",
    ),
    pytest.param(
        "qwen2",
        {"config": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}},
        None,
        id="Qwen2, a window in later layers",
    ),
    pytest.param("qwen3", {"head_dim": 32}, {}, id="Qwen3"),
    pytest.param("qwen3", {"config": {"attention_bias": True}, "tied_head": False}, {}, id="Qwen3 with biases"),
    pytest.param(
        "qwen3",
        {
            "config": {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        },
        None,
        id="Qwen3, a window in its first layer",
    ),
]


def _prompts() -> list[list[int]]:
    return [random.Random(length).choices(range(256), k=length) for length in (1, 2, 17, 90, 40)]


def _assert_equal(source: Path, reference: Reference) -> None:
    """Batched, chunked, preempted, with a paged cache: token for token."""
    runner = load_runner(ModelSource(path=str(source)), capacity_bytes=1 << 20)
    requests = [greedy(str(i), prompt) for i, prompt in enumerate(_prompts())]
    scheduler = run(runner, requests, per_request=7, num_blocks=12)
    assert scheduler.preemptions_total > 0
    for prompt, output in zip(_prompts(), outputs(requests), strict=True):
        reference.assert_greedy(prompt, output)
    assert reference.ties == 0


@pytest.mark.parametrize(
    "switch", [pytest.param("", marks=needs_kernels, id="kernels"), pytest.param("off", id="torch")]
)
@pytest.mark.parametrize(("family", "options", "gguf_fields"), FAMILIES)
def test_a_family_says_what_transformers_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: dict[str, Any],
    gguf_fields: dict[str, Any] | None,
    switch: str,
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    path = make_tiny_llama(tmp_path / "model", family=family, seed=3, **(SHAPE | options))
    reference = Reference.from_directory(path)
    _assert_equal(path, reference)
    if gguf_fields is not None:
        extra = {}
        if options.get("config", {}).get("rope_scaling") is LLAMA3:
            extra["rope_freqs.weight"] = _rope_factors(path)
        file = make_gguf(path, tmp_path / "model.gguf", kind=Kind.F32, fields=gguf_fields, extra=extra)
        _assert_equal(file, reference)


def _rope_factors(path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """How much slower each frequency turns than one that is not scaled."""
    shape = open_tensors(path).architecture
    plain = [shape.rope_theta ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2)]
    return np.array(np.array(plain) / shape.inverse_frequencies(), dtype=np.float32)


@needs_kernels
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_blocks_of_a_family_are_multiplied_with_as_they_are(tmp_path: Path, family: str) -> None:
    """Its rows are not in rotary pairs in the file, and its biases come after the product."""
    path = make_tiny_llama(tmp_path / "model", family=family, seed=3, **SHAPE)
    file = make_gguf(path, tmp_path / "model.gguf", kind=Kind.Q8_0)
    assert open_tensors(file).blocks("model.layers.0.self_attn.q_proj.weight") is not None
    round_like(path)
    _assert_equal(file, Reference.from_directory(path))


def test_a_window_that_nothing_exceeds_costs_nothing(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", family="mistral", config={"sliding_window": 100})
    shape = open_tensors(path).architecture
    assert shape.windows(100) == [None, None]
    assert shape.windows(101) == [100, 100]


def test_a_stretched_length_is_the_model_s_own(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model", family="qwen2", config={"rope_scaling": YARN})
    assert open_tensors(path).architecture.max_length_tokens == 1024
    config = {"rope_scaling": YARN, "max_position_embeddings": 64}
    path = make_tiny_llama(tmp_path / "other", family="qwen2", config=config)
    assert open_tensors(path).architecture.max_length_tokens == 256
