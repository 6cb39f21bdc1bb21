"""HTTP that is not what it seems: request smuggling, broken framing, and headers that mean two things.

Each case is sent on a connection of its own. None of them may reach the engine, unless it is marked as sound; where
two readers of the same bytes could disagree about where a request ends, an error ends the connection.
"""

from __future__ import annotations

from dataclasses import dataclass

CHAT = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}'
PATH = b"/v1/chat/completions"
# What a smuggler hides behind the request that everybody sees.
HIDDEN = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes, and the status that answers them."""

    name: str
    data: bytes
    statuses: tuple[int, ...] = (400,)
    sound: int = 0
    """Requests in it that reach the engine."""
    pure: tuple[int, ...] | None = None
    """What the parser without a C extension makes of it, where it is kinder or slower; no sound one becomes another."""


def post(
    *headers: bytes,
    body: bytes = b"",
    line: bytes = b"POST " + PATH + b" HTTP/1.1",
    host: bytes = b"Host: a\r\nConnection: close",
) -> bytes:
    """A request of these header lines."""
    return b"\r\n".join((line, *((host,) if host else ()), *headers, b"", body))


def _sized(value: bytes) -> bytes:
    return post(b"Content-Length: " + value, body=CHAT)


def _encoded(value: bytes, body: bytes = b"") -> bytes:
    return post(b"Transfer-Encoding: " + value, body=body or _chunks(CHAT))


def _chunks(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


def _with(lines: bytes) -> bytes:
    return post(lines, b"Content-Length: %d" % len(CHAT), body=CHAT)


SIZE = b"%d" % len(CHAT)

CASES = [
    # Where does the body end?
    Case("a-length-and-chunks",
         post(b"Content-Length: " + SIZE, b"Transfer-Encoding: chunked", body=_chunks(CHAT) + HIDDEN)),
    Case("chunks-and-a-length", post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n" + HIDDEN)),
    Case("two-lengths", post(b"Content-Length: 2", b"Content-Length: 90", body=b"{}" + HIDDEN)),
    Case("one-length-twice", post(b"Content-Length: 2", b"Content-Length: 2", body=b"{}" + HIDDEN)),
    Case("two-lengths-in-a-list", _sized(b"2, 90")),
    Case("one-length-twice-in-a-list", _sized(SIZE + b"," + SIZE)),
    Case("a-length-with-a-plus", _sized(b"+" + SIZE)),
    Case("a-length-below-nothing", _sized(b"-1")),
    Case("a-length-in-hex", _sized(b"0x45")),
    Case("a-length-with-an-underscore", _sized(b"6_9")),
    Case("a-length-in-other-digits", _sized("٦٩".encode())),
    Case("a-length-that-is-empty", _sized(b"")),
    Case("a-length-with-a-point", _sized(SIZE + b".0")),
    Case("a-length-in-two-words", _sized(b"6 9")),
    Case("a-length-beyond-64-bits", _sized(b"9" * 25), pure=(413,)),
    Case("chunked-is-not-last", _encoded(b"chunked, identity")),
    Case("chunked-after-another-coding", _encoded(b"gzip, chunked")),
    Case("chunked-twice-in-a-list", _encoded(b"chunked, chunked")),
    Case("chunked-in-two-headers",
         post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=_chunks(CHAT))),
    Case("chunked-and-identity-in-two-headers",
         post(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked", body=_chunks(CHAT))),
    Case("nearly-chunked", _encoded(b"xchunked")),
    Case("chunked-behind-a-vertical-tab", _encoded(b"\x0bchunked")),
    Case("chunked-with-a-parameter", _encoded(b"chunked;a=b")),
    Case("chunked-in-quotes", _encoded(b'"chunked"')),
    Case("chunks-in-http-1.0",
         post(b"Transfer-Encoding: chunked", body=_chunks(CHAT), line=b"POST " + PATH + b" HTTP/1.0")),
    Case("chunked-in-capitals", _encoded(b"CHUNKED"), (200,), sound=1),
    Case("another-coding", _encoded(b"gzip")),
    # Chunks.
    Case("a-chunk-size-that-is-no-number", _encoded(b"chunked", b"ZZ\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-size-below-nothing", _encoded(b"chunked", b"-5\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-size-with-a-plus", _encoded(b"chunked", b"+5\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-size-with-a-prefix", _encoded(b"chunked", b"0x5\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-size-with-an-underscore", _encoded(b"chunked", b"0_5\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-size-beyond-64-bits", _encoded(b"chunked", b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n"), pure=(408,)),
    Case("a-chunk-size-that-is-empty", _encoded(b"chunked", b"\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-size-after-a-space", _encoded(b"chunked", b" 5\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-longer-than-it-says", _encoded(b"chunked", b"3\r\nhello\r\n0\r\n\r\n")),
    Case("a-chunk-without-its-end", _encoded(b"chunked", b"5\r\nhello0\r\n\r\n" + HIDDEN)),
    Case("a-chunk-size-that-ends-in-a-line-feed", _encoded(b"chunked", b"5\nhello\r\n0\r\n\r\n" + HIDDEN)),
    Case("a-chunk-that-ends-in-a-line-feed", _encoded(b"chunked", b"5\r\nhello\n0\r\n\r\n" + HIDDEN)),
    Case("a-line-feed-in-a-chunk-extension", _encoded(b"chunked", b"5;a\nb\r\nhello\r\n0\r\n\r\n" + HIDDEN)),
    Case("a-chunk-extension-without-end", _encoded(b"chunked", b"5;" + b"a" * 100_000 + b"\r\nhello\r\n0\r\n\r\n")),
    Case("a-trailer-that-is-a-length",
         _encoded(b"chunked", b"45\r\n%s\r\n0\r\nContent-Length: 5\r\n\r\n" % CHAT), pure=(200,)),
    # Headers.
    Case("a-folded-header", _with(b"x-a: 1\r\n 2")),
    Case("a-folded-length", post(b"Content-Length:\r\n " + SIZE, body=CHAT)),
    Case("a-folded-coding", post(b"Transfer-Encoding:\r\n chunked", body=_chunks(CHAT))),
    Case("a-fold-before-any-header", post(b" x: 1", host=b"")),
    Case("a-space-before-the-colon", post(b"Content-Length : " + SIZE, body=CHAT)),
    Case("a-space-in-a-name", _with(b"x a: 1")),
    Case("a-name-with-a-bracket", _with(b"x(a: 1")),
    Case("a-name-in-other-letters", _with("ü: 1".encode())),
    Case("a-name-that-is-empty", _with(b": 1")),
    Case("a-line-without-a-colon", _with(b"nothing")),
    Case("a-zero-byte-in-a-value", _with(b"x-a: 1\x002")),
    Case("a-zero-byte-in-a-name", _with(b"x\x00a: 1")),
    Case("a-bare-return-in-a-value", _with(b"x-a: 1\r2")),
    Case("a-bare-return-that-hides-a-coding", _with(b"x-a: 1\rTransfer-Encoding: chunked")),
    Case("a-bare-line-feed-that-hides-a-coding", _with(b"x-a: 1\nTransfer-Encoding: chunked")),
    Case("lines-that-end-in-a-line-feed", b"POST %s HTTP/1.1\nHost: a\nContent-Length: %s\n\n%s" % (PATH, SIZE, CHAT)),
    Case("no-host", post(b"Content-Length: " + SIZE, body=CHAT, host=b"")),
    Case("two-hosts", post(b"Host: b", b"Content-Length: " + SIZE, body=CHAT)),
    Case("ten-thousand-headers", post(*(b"x-%d: 1" % i for i in range(10_000)))),
    Case("a-header-of-100-kB", _with(b"x-a: " + b"a" * 100_000)),
    Case("headers-of-80-KB-at-once", _with(b"\r\n".join(b"x-%d: %s" % (i, b"a" * 8_000) for i in range(10)))),
    Case("headers-of-2-MB", post(*(b"x-%d: %s" % (i, b"a" * 16_000) for i in range(120)))),
    # The first line.
    Case("no-version", b"POST %s\r\n\r\n" % PATH),
    Case("a-version-of-the-future", post(line=b"POST " + PATH + b" HTTP/9.9")),
    Case("a-version-in-words", post(line=b"POST " + PATH + b" HTTP/one")),
    Case("http-2-outright", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Case("tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4, pure=(408,)),
    Case("a-tab-in-the-line", post(line=b"POST\t" + PATH + b"\tHTTP/1.1")),
    Case("a-space-in-the-path", post(line=b"POST /v1/chat /completions HTTP/1.1")),
    Case("a-line-feed-in-the-path", post(line=b"POST /v1/\nchat HTTP/1.1")),
    Case("a-zero-byte-in-the-path", post(line=b"POST /v1/\x00chat HTTP/1.1")),
    Case("a-path-of-100-kB", post(line=b"POST /" + b"a" * 100_000 + b" HTTP/1.1")),
    Case("a-method-in-small-letters",
         post(b"Content-Length: " + SIZE, body=CHAT, line=b"post " + PATH + b" HTTP/1.1"), pure=(200,)),
    Case("a-method-with-a-bracket", post(line=b"PO(ST " + PATH + b" HTTP/1.1")),
    # What must still work, or is a plain mistake.
    Case("a-method-of-another-protocol", post(line=b"PROPFIND " + PATH + b" HTTP/1.1"), (405,)),
    Case("a-tunnel", b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\nConnection: close\r\n\r\n", (404,)),
    Case("a-socket-instead",
         post(b"Connection: Upgrade", b"Upgrade: websocket", b"Content-Length: " + SIZE,
         body=CHAT, host=b"Host: a"), (200,), sound=1),
    Case("http-2-instead",
         post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMA",
         b"Content-Length: " + SIZE, body=CHAT, host=b"Host: a"), (200,), sound=1),
    Case("an-expectation-nobody-knows",
         post(b"Expect: 200-maybe", b"Content-Length: " + SIZE, body=CHAT), (200,), sound=1),
    Case("one-behind-the-other",
         post(b"Content-Length: " + SIZE, body=CHAT, host=b"Host: a") + post(b"Content-Length: " + SIZE,
         body=CHAT), (200,), sound=2),
    Case("in-chunks",
         _encoded(b"chunked", b"5\r\n" + CHAT[:5] + b"\r\n40;x=y\r\n" + CHAT[5:] + b"\r\n0\r\n\r\n"), (200,), sound=1),
    Case("no-body", post()),
]  # fmt: skip
