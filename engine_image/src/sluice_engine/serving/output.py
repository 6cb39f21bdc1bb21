"""From emissions to an answer: text as it is settled, log probabilities, and how it ended. One object a choice."""

from __future__ import annotations

from sluice_engine.core.emissions import Emission
from sluice_engine.core.plan import Logprob
from sluice_engine.core.request import Outcome, Request
from sluice_engine.errors import DeadlineMissed, EngineNotReady, InvalidRequest, RequestError, RequestFailed
from sluice_engine.protocol.reply import FinishReason, Piece, RankedToken, TokenLogprob, ToolCallDelta
from sluice_engine.text.grammar_compiler import TokenConstraint
from sluice_engine.text.tokenizer import Tokenizer
from sluice_engine.text.tool_calls import ToolCalling, ToolCallReader


class ChoiceOutput:
    """What came of one request so far."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        echo: str = "",
        calling: ToolCalling | None = None,
    ) -> None:
        """`echo`: what stands before its text; `calling`: how tools are called in it."""
        self.index = index
        """Among all choices of the call."""
        self.request = request
        self.num_tokens = 0
        """Tokens sampled, the one that ended the answer included."""
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        spelled = {} if calling is None else calling.spelled
        self._decoder = tokenizer.decoder(stop, min_tokens=request.sampling.min_tokens, spelled=spelled)
        self._calls = None if calling is None else calling.reader()
        self._echo = echo
        self._logprobs: list[TokenLogprob] = []

    @property
    def num_calls(self) -> tuple[int, int]:
        """Tool calls that were told, and those of them whose arguments are a JSON object."""
        return (0, 0) if self._calls is None else (self._calls.num_calls, self._calls.num_complete)

    def has_ended(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def push(self, emission: Emission) -> Piece | None:
        """The text that this emission settles; None when it settles none. Nothing after the end.

        Raises:
            RequestError: the request failed or was ended from outside.
        """
        if self.has_ended():
            return None
        text = ""
        if emission.token_id is not None:
            text = self._token(emission.token_id, emission.logprob)
        if self._decoder.stopped:
            self.finish_reason = "stop"
        elif emission.outcome is not None:
            text += self._end(emission)
        calls: tuple[ToolCallDelta, ...] = ()
        if self._calls is not None:
            text, calls = self._read(self._calls, text)
        if not text and not calls and (self.finish_reason is None or not (self._logprobs or self._echo)):
            return None
        # With the first token's text, and no piece of its own: who times the answer takes each piece for a token.
        text, self._echo = self._echo + text, ""
        logprobs, self._logprobs = tuple(self._logprobs), []
        return Piece(text, logprobs, calls)

    def _read(self, reader: ToolCallReader, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What of a text is text, and what are calls."""
        settled = reader.push(text)
        text, calls = settled.text, settled.calls
        if reader.is_full:
            # As with a stop string: what would follow is no part of the answer.
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            rest = reader.finish()
            text, calls = text + rest.text, calls + rest.calls
        if self.finish_reason == "stop" and reader.all_complete:
            self.finish_reason = "tool_calls"
        return text, calls

    def _token(self, token_id: int, logprob: Logprob | None) -> str:
        self.num_tokens += 1
        if logprob is not None:
            # Kept until text is settled, so that a chunk's tokens are those that made its text.
            taken = RankedToken(*self._tokenizer.shown(token_id), logprob.value)
            top = tuple(RankedToken(*self._tokenizer.shown(other), value) for other, value in logprob.top)
            self._logprobs.append(TokenLogprob(taken, self._decoder.num_characters, top))
        return self._decoder.push(token_id)

    def _end(self, emission: Emission) -> str:
        if emission.outcome is None or not emission.outcome.is_answer:
            raise _error(emission)
        if emission.outcome is Outcome.STOP:
            self.num_tokens += 1  # the stop token was sampled too; it is not part of the text
        text = self._decoder.finish()
        self.finish_reason = "stop" if self._decoder.stopped or emission.outcome is Outcome.STOP else "length"
        return text


def _error(emission: Emission) -> RequestError:
    constraint = emission.request.constraint
    if isinstance(constraint, TokenConstraint) and constraint.broken:
        return InvalidRequest.field(constraint.param, constraint.broken, code="invalid_grammar")
    if emission.outcome is Outcome.FAILED:
        return RequestFailed(emission.request.error or "the request failed in the engine")
    if emission.outcome is Outcome.EXPIRED:
        return DeadlineMissed()
    return EngineNotReady("the engine ended this request")
