"""The simulator's errors, each one line for a person, so that `sluice` ends with exit code 2.

OperatorError
├── InvalidInput   a scenario, trace or record that breaks a rule; names the file and the key or line
└── Stuck          the scheduler plans nothing for work that it has, and nothing else is to come
"""

from __future__ import annotations

from sluice_operator.errors import OperatorError


class InvalidInput(OperatorError):
    """A file breaks a rule. The text names the file, the place in it and the limit."""

    def __init__(self, file: str, place: str, problem: str) -> None:
        super().__init__(f"{file}: {place}: {problem}" if place else f"{file}: {problem}")
        self.file = file
        self.place = place
        self.problem = problem


class Stuck(OperatorError):
    """An impossible state of the scheduler: a fault of ours, never of the scenario."""
