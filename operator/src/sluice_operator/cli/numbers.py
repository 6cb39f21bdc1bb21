"""Types of options that click lacks."""

from __future__ import annotations

import math
from typing import Any

import click

from sluice_operator.errors import InvalidSpec
from sluice_operator.resource.units import parse_duration_us


class Number(click.FloatRange):
    """A range that holds numbers only: NaN is within every one of click's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401, D102  # click's own
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


class Duration(click.ParamType[int]):
    """A duration as manifests write it, `150ms`; integer microseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401, D102  # click's own
        if isinstance(value, int):
            return value
        try:
            duration_us = parse_duration_us(str(value), self.name)
        except InvalidSpec as error:
            self.fail(str(error).removeprefix(f"{self.name}: "), param, ctx)
        if duration_us == 0:
            self.fail(f"{value} is no time at all.", param, ctx)
        return duration_us
