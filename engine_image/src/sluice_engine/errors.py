"""The engine's errors: what a caller did wrong, or what is missing, with its HTTP status and a stable code.

EngineError
├── InvalidConfig        a file or option the engine was started with
├── ModelUnavailable     weights or tokenizer missing, corrupt, or of an architecture that is not supported
├── AdapterRefused       a LoRA adapter that is missing, damaged, not supported, or for another model
├── SocketUnavailable    the Unix socket cannot be bound
└── RequestError         an HTTP answer, as an OpenAI error object
    ├── InvalidRequest   400  the body breaks a rule; `param` names the field
    ├── NotFound         404  a model or route that is not here
    ├── MethodNotAllowed 405  the route takes another method
    ├── RequestTimedOut  408  its body did not arrive
    ├── BodyTooLarge     413
    ├── EngineOverloaded 429  more waits than the engine holds
    ├── RequestFailed    500  this request failed in the engine; others go on
    ├── EngineNotReady   503  loading, draining or dead
    └── DeadlineMissed   504  its deadline passed, or could not be met any more
"""

from __future__ import annotations


def sentence(text: str) -> str:
    """A problem as every caller reads it: a capital letter first, a full stop last. The gate writes its own so too."""
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


class EngineError(Exception):
    """Any error this package expects; its text is one line for a person."""


class InvalidConfig(EngineError):
    """A configuration value breaks a rule. The text names the field, the value and the limit."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelUnavailable(EngineError):
    """The model cannot be loaded; the text says what and where. `code` is a stable word for `status.failure`."""

    def __init__(self, message: str, code: str = "ModelCorrupt") -> None:
        super().__init__(message)
        self.code = code


class AdapterRefused(EngineError):
    """An adapter cannot be loaded; the text says which file or field, and why."""


class SocketUnavailable(EngineError):
    """The engine's Unix socket cannot be bound; the text says why and where."""

    def __init__(self, message: str, code: str = "SocketUnavailable") -> None:
        super().__init__(message)
        self.code = code


class RequestError(EngineError):
    """An answer other than success, rendered as an OpenAI error object; which request it was, a header says."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    should_retry: bool | None = None
    """What the header x-should-retry says; None leaves the client to its own rules."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = sentence(message)
        super().__init__(self.message)
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(RequestError):
    """The body breaks a rule; nothing was queued."""

    status, type, code = 400, "invalid_request_error", "invalid_value"

    @classmethod
    def field(cls, path: str, problem: str, *, code: str | None = None) -> InvalidRequest:
        """The refusal of one field, named as the caller would write it."""
        return cls(f"Invalid '{path}': {problem}", param=path, code=code)


class NotFound(RequestError):
    """No such model or route."""

    status, type, code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(RequestError):
    """The route exists and takes another method."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class RequestTimedOut(RequestError):
    """The body did not arrive in time."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class BodyTooLarge(RequestError):
    """The body is over the limit; it was not read to its end."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class EngineOverloaded(RequestError):
    """More requests wait than the engine holds; the gate should have said so first."""

    status, type, code = 429, "rate_limit_error", "engine_overloaded"


class RequestFailed(RequestError):
    """This one request failed inside the engine; the batch went on without it."""

    status, type, code = 500, "server_error", "request_failed"


class EngineNotReady(RequestError):
    """No capacity exists now: the model is loading, the engine drains, or its loop has ended."""

    status, type, code = 503, "server_error", "engine_not_ready"


class DeadlineMissed(RequestError):
    """Its deadline passed, or could not be met any more; the same request sent again would miss it too."""

    status, type, code = 504, "server_error", "deadline_missed"
    should_retry = False

    def __init__(self, message: str = "the deadline of this request passed, or could not be met any more") -> None:
        super().__init__(message)
