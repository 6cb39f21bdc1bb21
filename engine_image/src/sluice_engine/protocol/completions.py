"""`/v1/completions`: prompts in, as text or token ids; text completions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice_engine.core.fit import MAX_CHOICES
from sluice_engine.protocol.body import UNSUPPORTED, Fields, check_text, is_kind, kind_of, parse_object
from sluice_engine.protocol.generation import Generation, parse_generation
from sluice_engine.protocol.reply import (
    Choice,
    ChunkWriter,
    FinishReason,
    Piece,
    ReplyHead,
    TokenLogprob,
    Usage,
)

# Each prompt is a request of its own for every choice; a longer list is a batch, which belongs in several calls.
MAX_PROMPTS = 32

MAX_TOP_LOGPROBS = 5
MAX_BEST_OF = 20

_UNSUPPORTED = frozenset({"suffix"})

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """Prompts to go on with."""

    model: str
    prompts: tuple[Prompt, ...]
    prompt_params: tuple[str, ...]
    """Where each prompt stands in the body, for errors."""
    echo: bool = False
    """Whether each answer begins with its prompt."""
    generation: Generation


def parse_completion(raw: bytes) -> CompletionCall:
    """The call in a request body.

    Raises:
        InvalidRequest: with `param` and `code`; nothing has been looked up yet.
    """
    fields = parse_object(raw)
    model = fields.required_text("model")
    prompts, params = _prompts(fields)
    fields.refuse_unsupported(_UNSUPPORTED)
    # 0 asks for the log probability of the chosen token alone.
    top = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    generation = parse_generation(fields, logprobs=top is not None, top_logprobs=top or 0)
    echo = fields.flag("echo")
    if echo and top is not None:
        fields.refuse("echo", "with logprobs is not supported: those of a prompt are not computed", UNSUPPORTED)
    if (choices := len(prompts) * generation.n) > MAX_CHOICES:
        many = (
            f"{len(prompts)} prompts with n {generation.n} make {choices} choices; one call may ask for {MAX_CHOICES}"
        )
        fields.refuse("n", many)
    best_of = fields.integer("best_of", 1, MAX_BEST_OF)
    if best_of is not None and best_of != generation.n:
        fields.unsupported("best_of", best_of)
    fields.end()
    return CompletionCall(model=model, prompts=prompts, prompt_params=params, echo=echo, generation=generation)


def _prompts(fields: Fields) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    value = fields.value("prompt")
    if value is None:
        fields.missing("prompt")
    if isinstance(value, list) and not value:
        fields.refuse("prompt", "must not be empty")
    if isinstance(value, str) or (isinstance(value, list) and is_kind(value[0], int)):
        return (_prompt(fields, "prompt", value),), ("prompt",)
    if not isinstance(value, list):
        problem = f"must be a string, an array of strings, or token ids, not {kind_of(value)}"
        fields.refuse("prompt", problem, "invalid_type")
    if len(value) > MAX_PROMPTS:
        fields.refuse("prompt", f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    names = tuple(f"prompt[{index}]" for index in range(len(value)))
    return tuple(_prompt(fields, name, item) for name, item in zip(names, value, strict=True)), names


def _prompt(fields: Fields, name: str, value: object) -> Prompt:
    if isinstance(value, str):
        if not value:
            fields.refuse(name, "must not be empty")
        check_text(value, fields.path(name))
        return value
    if not isinstance(value, list):
        fields.refuse(name, f"must be a string or an array of token ids, not {kind_of(value)}", "invalid_type")
    if not value:
        fields.refuse(name, "must not be empty")
    return fields.as_token_ids(name, value)


class CompletionReply:
    """Text completions: `Reply` in this endpoint's words."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._chunks = ChunkWriter(head, "text_completion")

    def opening(self, index: int, so_far: Usage | None = None) -> bytes:
        """Nothing: text completions have no role."""
        del index, so_far
        return b""

    def piece(self, index: int, piece: Piece, so_far: Usage | None = None) -> bytes:
        """A piece of text."""
        return self._chunks.choice(_choice(index, piece.text, self._logprobs(piece.logprobs), None), so_far)

    def closing(self, index: int, finish_reason: FinishReason, so_far: Usage | None = None) -> bytes:
        """The reason."""
        return self._chunks.choice(_choice(index, "", None, finish_reason), so_far)

    def usage(self, usage: Usage) -> bytes:
        """The counts."""
        return self._chunks.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        """The completion."""
        return {
            **self._head.fields("text_completion"),
            "choices": [
                _choice(choice.index, choice.text, self._logprobs(choice.logprobs), choice.finish_reason)
                for choice in choices
            ],
            "usage": usage.body(),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, object] | None:
        if not self._head.logprobs:
            return None
        return {
            "tokens": [token.taken.text for token in tokens],
            "token_logprobs": [token.taken.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens] if any(token.top for token in tokens) else None,
            "text_offset": [token.text_offset for token in tokens],
        }


def _likeliest(token: TokenLogprob) -> dict[str, float]:
    """By their texts, which two tokens may share; the one that was taken is among them however unlikely it was."""
    likeliest: dict[str, float] = {}
    for each in (*token.top, token.taken):
        likeliest.setdefault(each.text, each.logprob)
    return likeliest


def _choice(
    index: int, text: str, logprobs: dict[str, object] | None, finish_reason: FinishReason | None
) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
