"""How rotary frequencies are stretched beyond the length that a model was first trained for.

Pure arithmetic: which kind a model has is read elsewhere. What depends on the length of the request at hand (dynamic,
longrope) is not here: cached keys would have been turned by other frequencies than their queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """One way of stretching.

    - `linear` divides every frequency by `factor`.
    - `llama3` divides the slow ones, keeps the fast ones, and blends in between. Source: Llama 3.1's reference code.
    - `yarn` does so with a straight ramp over the dimensions, and multiplies q and k by `attention_factor`. Source:
      "YaRN: Efficient Context Window Extension of Large Language Models".
    - `factors` divides each frequency by its own number, as a GGUF file's `rope_freqs.weight` says.
    """

    kind: RopeKind
    factor: float = 1.0
    original_length_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    """Turns within the original length above which a frequency is kept."""
    beta_slow: float = 1.0
    """Turns below which it is divided."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole dimensions."""
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


def yarn_attention_factor(factor: float, multiplier: float = 1.0) -> float:
    """What the paper suggests q and k to be multiplied by."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> list[float]:
    """Radians that each pair of a head's dimensions turns per position."""
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return [frequency / scaling.factor for frequency in plain]
        case "llama3":
            return [_llama3(frequency, scaling) for frequency in plain]
        case "factors":
            return [frequency / factor for frequency, factor in zip(plain, scaling.factors, strict=True)]
        case "yarn":
            return _yarn(plain, theta, head_dim, scaling)


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_length_tokens * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def _yarn(plain: list[float], theta: float, head_dim: int, scaling: RopeScaling) -> list[float]:
    def dimension_of(turns: float) -> float:
        """The dimension that turns so often within the original length."""
        length = scaling.original_length_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    divided = [min(1.0, max(0.0, (i - low) / width)) for i in range(len(plain))]
    return [
        frequency * (1 - share) + frequency / scaling.factor * share
        for frequency, share in zip(plain, divided, strict=True)
    ]
