"""What a request asks for, read from its body.

The price is made in `pricing`, and whether it could ever run is `fitting`'s to say. The body is parsed to be priced,
never to be judged but for its size: a wrong type is priced as little and left to the engine, whose answer names the
field. Must not know the ledger or HTTP.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

from sluice_engine import bodies
from sluice_engine.core.fit import MAX_CHOICES
from sluice_engine.core.terms import FLEX
from sluice_engine.errors import sentence
from sluice_sidecar.errors import Reason, Refusal, Refused
from sluice_sidecar.estimates import media
from sluice_sidecar.estimates.media import MediaKind
from sluice_sidecar.estimates.prompt import NON_ASCII_WEIGHT, PromptSize

Route = Literal["chat", "completions"]

# What a chat template puts around one message (role, separators), and around the whole (a default system message).
MESSAGE_OVERHEAD_TOKENS = 8
TEMPLATE_OVERHEAD_TOKENS = 32
# Where it tells of tools it says how to call them, too: in 90 to 110 tokens, with the families that do.
TOOLS_OVERHEAD_TOKENS = 112
# What else of a body becomes part of a chat's prompt.
_TEMPLATE_FIELDS = ("tools", "tool_choice", "functions", "documents", "chat_template", "chat_template_kwargs")
# Where the length of an answer is asked for; the last is llama.cpp's, and goes before the others there.
_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
# What else may end an answer, beside the model's own end.
_ENDS = ("stop", "stop_token_ids")
# Of those and of a message, what is written out in the prompt: word for word or nearly so.
_WRITTEN_FIELDS = ("tools", "functions", "documents")
_WRITTEN_OF_A_MESSAGE = ("tool_calls", "function_call", "reasoning_content")
# The engine's own bound on the field; Python refuses to print numbers of thousands of digits.
MOST_OUTPUT_TOKENS = 2**31 - 1
# So many parts of messages are read in a millisecond; JSON is read in one go, a body of this size in two.
_STRIDE_PARTS = 512
_LONG_BYTES = 256 * 1024
_MOST_ROLE_CHARS = 32
TOO_DEEP = Refusal(Reason.INVALID_JSON, sentence(bodies.TOO_DEEP))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the body asks for, in bytes where tokens are not known yet."""

    prompts: tuple[PromptSize, ...]
    choices_per_prompt: int
    max_tokens: int | None
    param: str
    """The body's field that holds the prompt."""
    max_tokens_param: str = "max_tokens"
    """The field in which the length of the answer was asked for."""
    behind: bool = False
    """Whether its caller puts it behind its own other requests: a `priority` above 0."""
    user: str = ""
    """Whom the caller asks for, in its own words."""
    streamed: bool = False
    """Whether the answer is to come token by token."""

    least_tokens: int = 1
    """Output tokens that every answer has for certain, at most `max_tokens`."""
    flexible: bool = False
    """Whether its caller can wait: OpenAI's service tier `flex`."""
    model: str = ""
    """The name that the caller gives: the model's own, or that of an adapter; empty: the model's."""
    num_choices: int = 1
    """As asked for: of more than a call may have, not all are in `prompts` and `choices_per_prompt`."""

    @property
    def largest(self) -> int:
        """Index of the largest prompt."""
        return max(range(len(self.prompts)), key=lambda i: (self.prompts[i].tokens or 0, self.prompts[i].text_bytes))


def parse(body: bytes, route: Route) -> Asked:
    """What a body asks for.

    Raises:
        Refused: `bodies` says why it is not read, it is not an object, or too many messages to be looked at.
    """
    steps = parsing(body, route)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            asked: Asked = end.value
            return asked


def parsing(body: bytes, route: Route) -> Generator[None, None, Asked]:
    """As `parse`, in strides of about a millisecond where a body has very many parts, so that others get on."""
    try:
        data = bodies.read_json(body)
    except bodies.Unreadable as error:
        raise Refused(Refusal(Reason.INVALID_JSON, sentence(str(error)))) from error
    if not isinstance(data, dict):
        raise Refused(Refusal(Reason.INVALID_JSON, "The body must be a JSON object."))
    if len(body) >= _LONG_BYTES:
        yield
    try:
        prompts = ((yield from _chat(data)),) if route == "chat" else _prompts(data.get("prompt"))
    except RecursionError as error:
        raise Refused(TOO_DEEP) from error
    max_tokens, max_tokens_param = _limit(data)
    choices_per_prompt, sent = _positive(data.get("n")) or 1, data.get("prompt")
    num_prompts = len(sent) if isinstance(sent, list) and len(prompts) > 1 else 1
    return Asked(
        prompts=prompts,
        choices_per_prompt=min(MAX_CHOICES, choices_per_prompt),
        num_choices=num_prompts * choices_per_prompt,
        max_tokens=max_tokens,
        param="messages" if route == "chat" else "prompt",
        streamed=data.get("stream") is True,
        least_tokens=_least_tokens(data),
        flexible=data.get("service_tier") == FLEX,
        max_tokens_param=max_tokens_param,
        behind=_positive(data.get("priority")) is not None,
        user=user if isinstance(user := data.get("user"), str) else "",
        model=model if isinstance(model := data.get("model"), str) else "",
    )


def tokenize_body(body: bytes, asked: Asked) -> bytes:
    """What `/tokenize` is asked in order to count the largest prompt of a body that was parsed before: its text alone.

    Of a picture an engine counts there the mark that stands for it, after it has fetched and decoded it.
    """
    data = json.loads(body)
    if asked.param == "messages":
        question = {name: data[name] for name in ("messages", "tools") if data.get(name)}
        if data.get("tool_choice") == "none":
            # Then Sluice's engine does not tell the model of them.
            question["tool_choice"] = "none"
        if asked.prompts[0].media:
            question["messages"] = media.without_media(question["messages"])
    else:
        prompt = data["prompt"]
        question = {"prompt": prompt if isinstance(prompt, str) else prompt[asked.largest]}
    if isinstance(data.get("model"), str):
        question["model"] = data["model"]
    return json.dumps(question).encode()


def _limit(data: Mapping[str, object]) -> tuple[int | None, str]:
    """The longest answer that an engine may read in a body, and the field that says so; None: whatever fits.

    Where several fields say it, each engine goes by another. To llama.cpp a negative number is no limit.
    """
    found = {name: data[name] for name in _LIMITS if data.get(name) is not None}
    if not found or any(isinstance(value, int | float) and value < 0 for value in found.values()):
        return None, next(iter(found), "max_tokens")
    # A wrong type is the engine's to refuse: priced as the least. Beyond its own bound a number is just too large.
    tokens = {name: min(MOST_OUTPUT_TOKENS, _positive(value) or 1) for name, value in found.items()}
    name = max(tokens, key=lambda name: tokens[name])
    return tokens[name], name


def _least_tokens(data: Mapping[str, object]) -> int:
    """Output tokens before which nothing can end an answer: all of them where the model's own end does not."""
    if data.get("ignore_eos") is True and not any(data.get(name) for name in _ENDS):
        return MOST_OUTPUT_TOKENS
    return min(MOST_OUTPUT_TOKENS, _positive(data.get("min_tokens")) or 1)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _weighted_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    size = len(text.encode("utf-8", "surrogatepass"))
    # A character outside ASCII has at least two bytes, so this counts all but a few of their bytes.
    outside = min(size, 2 * (size - len(text)))
    return size + int(outside * (NON_ASCII_WEIGHT - 1))


def _chat(data: Mapping[str, object]) -> Generator[None, None, PromptSize]:
    sent = data.get("messages")
    messages = sent if isinstance(sent, list) else []
    if (problem := bodies.too_many_pieces(messages)) is not None:
        raise Refused(Refusal(Reason.BAD_REQUEST, f"Invalid 'messages': {problem}.", param="messages"))
    texts: list[str] = []
    kinds: list[MediaKind] = []
    told = [_told({name: data[name] for name in _TEMPLATE_FIELDS if name in data})]
    count, written_bytes, stride = 0, _written_bytes(data, _WRITTEN_FIELDS), _STRIDE_PARTS
    for message in messages:
        count += 1
        content = message.get("content") if isinstance(message, dict) else None
        written_bytes += _written_bytes(message, _WRITTEN_OF_A_MESSAGE) if isinstance(message, dict) else 0
        told.append(_told_beside_content(message) if isinstance(message, dict) else b"{}")
        for part in content if isinstance(content, list) else [content]:
            text, kind = media.text_of(part) if isinstance(part, dict) else part, media.kind_of(part)
            if isinstance(text, str):
                texts.append(text)
            if kind is not None:
                kinds.append(kind)
            if isinstance(text, str) and kind is None:
                told.append(text.encode("utf-8", "surrogatepass"))
            else:
                # Of a picture only that it is another one: its size says nothing about its tokens.
                told.append(blake2b(_told(part), digest_size=16).digest())
            stride -= 1
            if not stride:
                yield
                stride = _STRIDE_PARTS
    overhead = TEMPLATE_OVERHEAD_TOKENS + MESSAGE_OVERHEAD_TOKENS * count
    if data.get("tools"):
        overhead += TOOLS_OVERHEAD_TOKENS
    # Each part apart from the next, or two conversations could say the same in other words' places.
    text_bytes = written_bytes + sum(map(_weighted_bytes, texts))
    return PromptSize(text_bytes, overhead, media=media.counted(kinds), text=b"\x00".join(told))


def _told_beside_content(message: Mapping[str, object]) -> bytes:
    role = message.get("role")
    # As nearly all are.
    if len(message) == 2 and "content" in message and isinstance(role, str) and len(role) <= _MOST_ROLE_CHARS:
        return _told_role(role)
    return _told({name: value for name, value in message.items() if name != "content"})


@lru_cache(maxsize=64)
def _told_role(role: str) -> bytes:
    return _told({"role": role})


def _written_bytes(fields: Mapping[str, object], names: tuple[str, ...]) -> int:
    return sum(len(_told(fields[name])) for name in names if fields.get(name))


def _told(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _prompts(prompt: object) -> tuple[PromptSize, ...]:
    if isinstance(prompt, list) and prompt and not set(map(type, prompt)) <= {int, bool}:
        return tuple(_one(item) for item in prompt[:MAX_CHOICES])
    return (_one(prompt),)


def _one(item: object) -> PromptSize:
    if isinstance(item, str):
        return PromptSize(_weighted_bytes(item), 1, text=item.encode("utf-8", "surrogatepass"))
    if not isinstance(item, list) or not item:
        return PromptSize()
    try:
        text = array("q", item).tobytes()
    except (TypeError, OverflowError):
        text = b""  # no token ids: the engine says so
    return PromptSize(tokens=len(item), text=text)
