"""The operator's errors, each one line for a person.

    OperatorError
    ├── InvalidManifest   a file that is no InferenceService, or one that breaks a rule; `problems` lists all
    ├── InvalidSpec       a field that passed the schema and still cannot be understood
    ├── InvalidSettings   an option or environment variable of the operator itself
    ├── ApiRefused        the API server said no to an object of ours; `status` is its HTTP status
    │   └── NamespaceEnds the namespace is being deleted, so nothing can be made in it any more
    ├── LeaseLost         another operator may act now, so this one must not
    ├── InvalidRecords    what should be records of a pod is something else
    ├── Unreachable       nobody answers at an address, or it is no gate
    ├── PodFailed         a local process ended, or never became ready
    └── ServiceGone       the InferenceService is not there any more, and no watch has told so yet

Nothing here maps to HTTP: the operator answers nobody but the API server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FORBIDDEN = 403
_NOT_FOUND = 404
# As the API server words it when its authorizer, and not a quota or a policy, says no.
_NO_RIGHT = re.compile(r"forbidden: User .* cannot \w+ resource")


class OperatorError(Exception):
    """Any error this package expects."""


class InvalidManifest(OperatorError):
    """A manifest breaks a rule; the text is the first problem and says how many follow."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{where}: {problems[0]}{more}")
        self.where = where
        self.problems = tuple(problems)


class InvalidSpec(OperatorError):
    """A value of the spec cannot be understood. The text names the field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


class InvalidSettings(OperatorError):
    """An option of the operator breaks a rule. The text names the option."""


class ApiRefused(OperatorError):
    """The API server refused a request for good: the object is invalid, forbidden, or in conflict."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = 0.0
        """When the server wants to be asked again at the earliest; 0: it did not say."""

    @property
    def is_not_found(self) -> bool:
        """There is nothing of that name, or no such kind."""
        return self.status == _NOT_FOUND

    @property
    def lacks_right(self) -> bool:
        """The operator itself may not do this, whatever the spec is; so says an API server that just started, too."""
        return self.status == _FORBIDDEN and _NO_RIGHT.search(self.message) is not None


class NamespaceEnds(ApiRefused):
    """Nothing can be made in a namespace that is being deleted, and nothing needs to be."""


class LeaseLost(OperatorError):
    """The Lease is another's, or could not be renewed in time: what it allowed ends, and the process begins anew."""


class InvalidRecords(OperatorError):
    """A file or an answer holds no records of a pod. The text names the place and what is wrong there."""


class Unreachable(OperatorError):
    """There is no gate's admin port at an address, or nobody answers. The text is the address and why."""


class PodFailed(OperatorError):
    """A local engine or gate ended on its own, or did not become ready; the text holds its last words."""


class ServiceGone(OperatorError):
    """The InferenceService does not exist any more, though no watch has told so yet."""
