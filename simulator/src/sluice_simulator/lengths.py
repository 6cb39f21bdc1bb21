"""How long prompts and answers are: distributions over whole tokens, from a seeded source of randomness."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from sluice_simulator.fields import Fields

Distribution = Literal["Fixed", "Uniform", "Exponential", "LogNormal"]
# Where no bound is set. An exponential draw beyond this many means comes once in five hundred million.
_REACH = 20
_DISTRIBUTIONS = ("Fixed", "Uniform", "Exponential", "LogNormal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """One distribution. Draws outside [least, most] are moved to the bound, which moves the mean a little."""

    distribution: Distribution
    mean: float
    least: int
    most: int
    sigma: float = 1.0
    """LogNormal only: standard deviation of the logarithm."""

    def draw(self, source: random.Random) -> int:
        """Tokens of one prompt or answer."""
        if self.distribution == "Fixed":
            return self.least
        if self.distribution == "Uniform":
            return source.randint(self.least, self.most)
        if self.distribution == "Exponential":
            value = source.expovariate(1 / self.mean)
        else:
            value = source.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(self.most, max(self.least, round(value)))


def read_lengths(fields: Fields, most_tokens: int) -> Lengths:
    """The distribution that a section of a scenario names.

    Raises:
        InvalidInput: it contradicts itself, or reaches beyond `most_tokens`.
    """
    distribution = fields.choice("distribution", _DISTRIBUTIONS, "Exponential" if fields.has("mean") else "Uniform")
    sigma = 1.0
    if distribution == "Fixed":
        least = most = fields.whole("tokens", 1, most_tokens)
        mean = float(least)
    elif distribution == "Uniform":
        least = fields.whole("least", 1, most_tokens)
        most = fields.whole("most", 1, most_tokens)
        mean = (least + most) / 2
    else:
        mean = fields.number("mean", 1, most_tokens)
        least = fields.whole("least", 1, most_tokens, 1)
        most = fields.whole("most", 1, most_tokens, min(most_tokens, round(_REACH * mean)))
        if distribution == "LogNormal":
            sigma = fields.number("sigma", 0.01, 4, 1.0)
    fields.end()
    if most < least:
        raise fields.problem("most", f"must be at least {least}, which is the least, not {most}")
    if not least <= mean <= most:
        raise fields.problem("mean", f"must lie between {least} and {most}, not at {mean:g}")
    return Lengths(distribution=distribution, mean=mean, least=least, most=most, sigma=sigma)  # type: ignore[arg-type]
