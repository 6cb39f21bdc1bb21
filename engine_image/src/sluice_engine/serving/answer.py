"""One call's answer while it grows: streamed frame by frame, or whole. Both settle text in the same place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sluice_engine.core.emissions import Emission
from sluice_engine.core.request import Request
from sluice_engine.errors import RequestError, RequestFailed
from sluice_engine.protocol.generation import Generation
from sluice_engine.protocol.reply import (
    DONE,
    Choice,
    FinishReason,
    Piece,
    Reply,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    error_frame,
    held_frame,
)
from sluice_engine.serving.call_stream import CallStream
from sluice_engine.serving.chat_prompt import Prompt
from sluice_engine.serving.output import ChoiceOutput
from sluice_engine.text.tokenizer import Tokenizer
from sluice_engine.text.tool_calls import ToolCalling

log = logging.getLogger(__name__)


class Writer(Protocol):
    """Where frames go."""

    async def write(self, data: bytes) -> None:
        """Send, and wait while the reader is slow."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """What one emission settled for one choice."""

    index: int
    piece: Piece | None
    finish_reason: FinishReason | None
    """Set once, with the last piece."""
    is_held: bool = False
    """Whether there was a token, and its text has to wait."""


@dataclass(slots=True)
class ToolCallCounts:
    """Tool calls of all answers that have ended."""

    complete: int = 0
    incomplete: int = 0


@dataclass(slots=True)
class _Whole:
    """A choice that is being collected."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    tool_calls: list[list[ToolCallDelta]] = field(default_factory=list)

    def take(self, piece: Piece) -> None:
        """Add a piece."""
        self.texts.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        for delta in piece.tool_calls:
            if delta.name is not None:
                self.tool_calls.append([])
            self.tool_calls[delta.index].append(delta)

    def choice(self, index: int) -> Choice:
        """The answer, once it has ended."""
        tool_calls = tuple(
            ToolCallDelta(deltas[0].index, deltas[0].name, "".join(delta.arguments for delta in deltas))
            for deltas in self.tool_calls
        )
        return Choice(index, "".join(self.texts), tuple(self.logprobs), self.finish_reason, tool_calls)


class Answer:
    """All choices of one call."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        generation: Generation,
        prompts: Sequence[Prompt],
        calling: ToolCalling | None = None,
        counts: ToolCallCounts | None = None,
    ) -> None:
        """`calling`: how tools are called in it, where they may be; `counts`: where its calls are counted."""
        self._include_usage = generation.include_usage
        self._continuous_usage = generation.continuous_usage
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        echoes = [prompt.echo(tokenizer) for prompt in prompts]
        self._outputs = {
            request.id: ChoiceOutput(index, request, tokenizer, generation.stop, echoes[index // generation.n], calling)
            for index, request in enumerate(requests)
        }
        self._num_open = len(requests)
        # The beginning of a call waits for its function's name: a dozen tokens, which would look like a long silence.
        self._tells_held = calling is not None
        self._counts = counts or ToolCallCounts()

    async def write(self, stream: CallStream, reply: Reply, writer: Writer) -> None:
        """Stream it, one write for all choices that a step moved on. An error is the last frame: no [DONE] follows."""
        frames = [reply.opening(index, self._so_far()) for index in range(len(self._outputs))]
        if any(frames):
            await writer.write(b"".join(frames))
        frames.clear()
        try:
            while self._num_open:
                for emission in await stream.next():
                    frames.extend(self._frames(reply, self._take(stream, emission)))
                if frames and self._num_open:
                    await writer.write(b"".join(frames))
                    frames.clear()
        except RequestError as error:
            frames.append(error_frame(error))
        except ConnectionError:
            raise  # the client has left
        except Exception:
            # The headers are out: the only way left to tell the client is an event, and silence would hang it.
            log.exception("stream failed")
            frames.append(error_frame(RequestFailed("the answer could not be written; the engine's log says why")))
        else:
            if self._include_usage:
                frames.append(reply.usage(self._usage()))
            frames.append(DONE)
        await writer.write(b"".join(frames))

    async def whole(self, stream: CallStream, reply: Reply) -> dict[str, object]:
        """The body, once all choices have ended.

        Raises:
            RequestError: one of them failed; the others are worth nothing alone.
        """
        choices = [_Whole() for _ in self._outputs]
        while self._num_open:
            for emission in await stream.next():
                progress = self._take(stream, emission)
                choice = choices[progress.index]
                if progress.piece is not None:
                    choice.take(progress.piece)
                if progress.finish_reason is not None:
                    choice.finish_reason = progress.finish_reason
        return reply.whole([choice.choice(index) for index, choice in enumerate(choices)], self._usage())

    def _take(self, stream: CallStream, emission: Emission) -> Progress:
        """What an emission settles; nothing for a choice that has ended."""
        output = self._outputs[emission.request.id]
        if output.has_ended():
            return Progress(output.index, None, None)
        piece = output.push(emission)
        finish_reason = output.finish_reason
        if finish_reason is not None:
            self._num_open -= 1
            stream.stop(emission.request.id)
            told, complete = output.num_calls
            self._counts.complete += complete
            self._counts.incomplete += told - complete
        is_held = self._tells_held and piece is None and emission.token_id is not None
        return Progress(output.index, piece, finish_reason, is_held)

    def _frames(self, reply: Reply, progress: Progress) -> list[bytes]:
        so_far = self._so_far()
        frames = [] if progress.piece is None else [reply.piece(progress.index, progress.piece, so_far)]
        if progress.is_held:
            frames.append(held_frame(progress.index))
        if progress.finish_reason is not None:
            frames.append(reply.closing(progress.index, progress.finish_reason, so_far))
        return frames

    def _so_far(self) -> Usage | None:
        """The counts for a chunk, where each is to have them."""
        return self._usage() if self._continuous_usage else None

    def _usage(self) -> Usage:
        outputs = self._outputs.values()
        # As the prompt counts once, so does what was found of it: by its first choice.
        cached_tokens = sum(
            output.request.num_cached_tokens for output in outputs if output.request.sampling.choice == 0
        )
        return Usage(self._prompt_tokens, sum(output.num_tokens for output in outputs), cached_tokens)
