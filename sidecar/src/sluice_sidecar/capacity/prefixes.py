"""Which prompts begin like one that the engine has computed: how much of their prefill is done already.

Owns the keys of such beginnings: hashes of the prompt's text, chained and salted by tenant and adapter, as the engine's
own are of its tokens (it shares nothing between those either). A beginning is credited only once the engine has said
that it computed a prompt of that text, never further than that prompt went, and by as much as it turned out to find of
late. Pure. Must not know requests, or what a credit is used for. Start reading at `Prefixes.match`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

# Some 64 tokens, a few KV blocks: fine enough for a credit, coarse enough to cost some 50 µs for a prompt of 4,096.
CHUNK_BYTES = 256
# Half a million bytes, longer than any model's context.
MOST_CHUNKS = 2048
# 128 bits: a second text of the same key is out of reach, by chance or on purpose.
KEY_BYTES = 16
# Some 8 MiB of keys. The engine's own pool, counted in tokens, is the other bound.
MOST_KEYS = 32_768
# The share that was found is that of the last twenty credits or so.
DECAY = 0.95


class Beginning:
    """A prompt's text as keys of its beginnings, each `CHUNK_BYTES` longer; made only as far as they are asked for."""

    __slots__ = ("_key", "_keys", "_text", "num_bytes", "num_chunks")

    def __init__(self, tenant: str, text: bytes, adapter: str = "") -> None:
        """`adapter`: the name that the call gives as its model, where it is not the model's own."""
        self.num_bytes = len(text)
        self.num_chunks = min(MOST_CHUNKS, len(text) // CHUNK_BYTES)
        self._text = text
        # `person` keeps a tenant's name from being taken for an adapter's, and either for a text.
        self._key = blake2b(tenant.encode(), digest_size=KEY_BYTES, person=b"tenant").digest()
        if adapter:
            name = adapter.encode("utf-8", "surrogatepass")
            self._key = blake2b(self._key + name, digest_size=KEY_BYTES, person=b"adapter").digest()
        self._keys: list[bytes] = []

    def key(self, index: int) -> bytes:
        """The key of everything up to the end of a chunk."""
        keys = self._keys
        while len(keys) <= index:
            start = len(keys) * CHUNK_BYTES
            self._key = blake2b(self._key + self._text[start : start + CHUNK_BYTES], digest_size=KEY_BYTES).digest()
            keys.append(self._key)
        return keys[index]

    def settle(self) -> None:
        """Make all keys, and hold the text no longer."""
        if self.num_chunks:
            self.key(self.num_chunks - 1)
        self._text = b""

    def tokens(self, index: int, prompt_tokens: int) -> int:
        """Tokens up to the end of a chunk, where the whole prompt has so many; rounded down."""
        return prompt_tokens * (index + 1) * CHUNK_BYTES // self.num_bytes


@dataclass(frozen=True, slots=True)
class Match:
    """A prompt, and its longest known beginning."""

    beginning: Beginning
    num_bytes: int = 0
    tokens: int = 0
    """What the engine computed of it once."""
    key: bytes = b""


class Prefixes:
    """The beginnings that the engine has computed, and how far it still finds them."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """By key: (tokens up to there, tokens of its last chunk); the longest unused first."""
        self._held_tokens = 0
        self._found = 0.0
        self._matched = 0.0
        self.credited_tokens_total = 0
        """Prompt tokens that were matched, of requests that the engine has begun since."""
        self.found_tokens_total = 0
        """Of those, tokens that the engine found."""

    @property
    def share(self) -> float:
        """Of what is matched, the part that the engine finds; 1 until it has turned out otherwise."""
        return self._found / self._matched if self._matched else 1.0

    def match(self, beginning: Beginning) -> Match:
        """The longest beginning of a prompt that the engine has computed before."""
        depth, tokens, key = 0, 0, b""
        while depth < beginning.num_chunks:
            deeper = beginning.key(depth)
            known = self._tokens.get(deeper)
            if known is None:
                break
            depth, tokens, key = depth + 1, known[0], deeper
        return Match(beginning, depth * CHUNK_BYTES, tokens, key)

    def credit(self, match: Match, prompt_tokens: int, block_tokens: int) -> int:
        """Tokens of a prompt that need not be computed, in whole blocks; its last token always is."""
        tokens = min(int(match.tokens * self.share), prompt_tokens - 1)
        return max(0, tokens // block_tokens * block_tokens)

    def computed(self, beginning: Beginning, prompt_tokens: int, pool_tokens: int) -> None:
        """The engine has computed a prompt: its beginnings are there, as far as a pool of that size can hold them."""
        ends = [beginning.tokens(index, prompt_tokens) for index in range(beginning.num_chunks)]
        # The deepest first, so that what many share is forgotten last.
        for index in reversed(range(beginning.num_chunks)):
            key, new = beginning.key(index), (ends[index], ends[index] - (ends[index - 1] if index else 0))
            old = self._tokens.pop(key, None)
            # Equal texts end at the same tokens but for what stands behind them: the least is safe.
            self._tokens[key] = new if old is None else min(old, new)
            self._held_tokens += self._tokens[key][1] - (0 if old is None else old[1])
        while self._tokens and (len(self._tokens) > MOST_KEYS or self._held_tokens > pool_tokens):
            _, (_, tokens) = self._tokens.popitem(last=False)
            self._held_tokens -= tokens

    def judge(self, matched_tokens: int, found_tokens: int) -> None:
        """The engine has begun a request that was matched: what it found of that, both in whole blocks."""
        found_tokens = min(found_tokens, matched_tokens)
        self._found = self._found * DECAY + found_tokens
        self._matched = self._matched * DECAY + matched_tokens
        self.credited_tokens_total += matched_tokens
        self.found_tokens_total += found_tokens

    def forget(self) -> None:
        """The engine began anew: nothing is computed. What share it finds holds on."""
        self._tokens.clear()
        self._held_tokens = 0
