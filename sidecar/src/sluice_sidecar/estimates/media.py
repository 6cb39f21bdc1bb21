"""What is in a message beside text: pictures, sound, films, files; and how many tokens of a prompt each is worth.

How many depends on the model and on what is in it, and neither stands in a request: a picture of 80 KB is 256 tokens to
one model and 4,000 to another. So each kind has a number for a start, until answers have told better. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from sluice_sidecar.estimates.upper import UpperQuantile

MediaKind = Literal["image", "audio", "video", "file"]
KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
Media = tuple[tuple[MediaKind, int], ...]
"""How many there are of each kind."""

# Between what models make of a picture of a million pixels: 256 (Gemma 3), 576 (LLaVA 1.5), 765 (OpenAI), 1,369
# (Qwen2-VL), 1,601 a tile (Llama 3.2), 4,096 (Pixtral); of half a minute of sound, 188 (Ultravox) to 750 (Qwen2-Audio).
START_TOKENS: Mapping[MediaKind, int] = {"image": 1024, "audio": 1024, "video": 4096, "file": 4096}
# Fewer than for text: they differ less from one to the next, and the start is further off.
_LEAST_SAMPLES = 4
_WINDOW = 64
# Names of parts, and of the field in a part that has no type: OpenAI's, and vLLM's and SGLang's beside.
_KIND_OF: Mapping[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
}
# Parts of text by their own names beside "text".
_TEXTS = ("text", "refusal", "thinking")


def text_of(part: Mapping[str, object]) -> str | None:
    """The text of a part of a message; None where it is something else, or is wrong."""
    for name in _TEXTS:
        if isinstance(text := part.get(name), str):
            return text
    return None


def kind_of(part: object) -> MediaKind | None:
    """What a part of a message is; None of text, and of what the engine will say is wrong."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if isinstance(kind, str) and kind in _KIND_OF:
        # Whatever text somebody has put beside it: engines go by the type.
        return _KIND_OF[kind]
    if text_of(part) is not None:
        return None
    if isinstance(kind, str):
        # One of no known name is something that this file has not heard of, and the engine may have.
        return None if kind in _TEXTS else "file"
    return next((_KIND_OF[name] for name in part if name in _KIND_OF), None)


def without_media(messages: object) -> object:
    """The messages with their text alone."""
    if not isinstance(messages, list):
        return messages
    return [_text_alone(message) for message in messages]


def _text_alone(message: object) -> object:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        return message
    return message | {"content": [part for part in content if kind_of(part) is None] or ""}


class MediaTokens:
    """What one of each kind comes to, learned from prompts whose length was told; a high value, to err safely."""

    def __init__(self) -> None:
        self._learned = {
            kind: UpperQuantile(tokens, window=_WINDOW, least_samples=_LEAST_SAMPLES)
            for kind, tokens in START_TOKENS.items()
        }

    def tokens_of(self, kind: MediaKind) -> int:
        """What one of a kind is taken for."""
        return round(self._learned[kind].value)

    def tokens(self, media: Media) -> int:
        """What all of it comes to."""
        return sum(number * self.tokens_of(kind) for kind, number in media)

    def learn(self, media: Media, tokens: int) -> None:
        """Take in what came beside the text of one prompt; of several kinds nobody knows which was how long."""
        if len(media) == 1:
            ((kind, number),) = media
            self._learned[kind].learn(max(1.0, tokens / number))


def counted(kinds: Sequence[MediaKind]) -> Media:
    """How many there are of each."""
    return tuple((kind, number) for kind in KINDS if (number := kinds.count(kind)))
