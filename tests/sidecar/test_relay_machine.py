"""Whatever is sent, read, held up and cut in whatever order: bytes arrive whole and in order, or the call is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice_sidecar.web.relay import Relay

# Of a body the parser holds twice this, and what came in one piece beyond.
LIMIT = 1024
MOST_PIECE = 8 * 1024
MOST_WITH_HEAD = 20_000
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = bytes(range(256)) * 512


class Wire(asyncio.Transport):
    """The engine's side of a connection: what was sent waits in the kernel while nobody reads."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.paused = self.closed = self.lost = False
        self.in_kernel = b""
        self.delivered = 0

    def is_closing(self) -> bool:
        return self.closed

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def is_reading(self) -> bool:
        return not self.paused

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    abort = close

    def step(self) -> None:
        """What a turn of the loop does with it."""
        if self.closed:
            self.lose(None)
        elif self.in_kernel and not self.paused:
            piece, self.in_kernel = self.in_kernel[:MOST_PIECE], self.in_kernel[MOST_PIECE:]
            self.delivered += len(piece)
            cast("asyncio.Protocol", self.protocol).data_received(piece)

    def lose(self, error: Exception | None) -> None:
        if not self.lost:
            self.closed = self.lost = True
            self.protocol.connection_lost(error)


class Reader:
    """The client's side: behind when it says so, and it never takes a piece while it is."""

    def __init__(self) -> None:
        self.got = b""
        self.slow = self.left = self.behind = False
        self.caught_up = asyncio.Event()
        self.most_waits = 0

    def take(self, piece: bytes) -> bool:
        assert piece
        assert not self.behind, "nothing more while it is behind"
        if self.left:
            raise ConnectionResetError("the client has left")
        self.got += piece
        self.behind = self.slow
        return self.behind

    async def wait(self) -> None:
        while self.slow:
            self.caught_up.clear()
            await self.caught_up.wait()
            if self.left:
                raise ConnectionResetError("the client has left")
        self.behind = False


class RelayMachine(RuleBasedStateMachine):
    """One body, from its head to its end or to what came before that."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.complaints: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.complaints.append(context))

    @initialize(
        sizes=st.lists(st.sampled_from([1, 7, 900, 2_500, 5_000]), max_size=24),
        framing=st.sampled_from(["chunked", "length", "until closed"]),
        with_head=st.sampled_from([0, 0, 1, 12, 3_000, MOST_WITH_HEAD]),
        slow=st.booleans(),
    )
    def begin(self, sizes: list[int], framing: str, with_head: int, *, slow: bool) -> None:
        self.body = BODY[: sum(sizes)]
        head, self.wire_bytes, start = b"HTTP/1.1 200 OK\r\n", b"", 0
        if framing == "chunked":
            head += CHUNKED
            for size in sizes:
                self.wire_bytes += b"%x\r\n%b\r\n" % (size, self.body[start : start + size])
                start += size
            self.wire_bytes += b"0\r\n\r\n"
        else:
            head += b"Content-Length: %d\r\n" % len(self.body) if framing == "length" else b""
            self.wire_bytes = self.body
        self.framed = framing != "until closed"
        self.parser: ResponseHandler
        self.reader = Reader()
        self.reader.slow = slow
        self._run(self._begin(head + b"\r\n" + self.wire_bytes[:with_head]))
        self.sent = min(with_head, len(self.wire_bytes))
        self.cut = False
        self._turn()

    async def _begin(self, first: bytes) -> None:
        self.parser = ResponseHandler(self.loop)
        self.wire = Wire(self.parser)
        self.parser.connection_made(self.wire)
        self.parser.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=LIMIT)
        self.parser.data_received(first)
        _, self.content = await self.parser.read()
        # As aiohttp does: what was whole with its head has given its connection back.
        connection = None if self.content.is_eof() else SimpleNamespace(transport=self.wire, protocol=self.parser)
        self.kept_connection = connection is not None
        upstream = cast("aiohttp.ClientResponse", SimpleNamespace(content=self.content, connection=connection))
        self.task = asyncio.ensure_future(Relay(upstream, self.reader.take, self.reader.wait).run())

    # What happens to it.

    @rule(size=st.sampled_from([1, 40, 3_000, 12_000, 60_000]))
    def engine_sends(self, size: int) -> None:
        if not self.cut:
            self.wire.in_kernel += self.wire_bytes[self.sent : self.sent + size]
            self.sent = min(self.sent + size, len(self.wire_bytes))
        self._turn()

    @precondition(lambda self: self.sent == len(self.wire_bytes) and not self.cut)
    @rule()
    def engine_closes_at_its_end(self) -> None:
        self._lose(None, after_all=True)

    @rule(error=st.sampled_from([None, ConnectionResetError("reset")]))
    def engine_is_cut(self, error: Exception | None) -> None:
        self._lose(error, after_all=False)

    @precondition(lambda self: not self.cut)
    @rule()
    def call_is_cut(self) -> None:
        """As `Call.end_early` does: the response is closed, which closes its connection."""
        if self.kept_connection:
            self.wire.close()
            self.cut = True
        self._turn()

    @rule()
    def reader_falls_behind(self) -> None:
        self.reader.slow = True

    @rule()
    def reader_catches_up(self) -> None:
        self.reader.slow = False
        self._call(self.reader.caught_up.set)

    @rule()
    def client_leaves(self) -> None:
        self.reader.left = True
        self._call(self.reader.caught_up.set)

    @rule()
    def call_is_cancelled(self) -> None:
        """As the server does where it notices first that the client has left."""
        self.reader.left = True
        self._call(self.task.cancel)

    def _lose(self, error: Exception | None, *, after_all: bool) -> None:
        self.cut = True

        def lose() -> None:
            if after_all:
                # Bytes before an end are read before it.
                while self.wire.in_kernel and not self.wire.paused and not self.wire.closed:
                    self.wire.step()
                if self.wire.in_kernel:
                    return
            self.wire.lose(error)

        self._call(lose)
        if after_all and not self.wire.lost:
            self.cut = False

    # What holds.

    @invariant()
    def what_arrived_is_a_beginning_of_the_body(self) -> None:
        if hasattr(self, "reader"):
            assert self.body.startswith(self.reader.got)

    @invariant()
    def no_more_is_held_than_is_allowed(self) -> None:
        if hasattr(self, "content") and not self.task.done():
            held = self.content.total_bytes - len(self.reader.got)
            # A piece that was read from the kernel before the reader fell behind is parsed as far as it goes.
            assert held <= 2 * LIMIT + MOST_WITH_HEAD if self.wire.delivered == 0 else held <= 2 * LIMIT + MOST_PIECE

    @invariant()
    def it_ends_when_it_should_and_says_how(self) -> None:
        if not hasattr(self, "task"):
            return
        whole = self.reader.got == self.body
        if not self.task.done():
            assert self.reader.behind or not self.wire.lost, "who is told of an end ends"
            assert self.reader.behind or not (self.framed and self._all_parsed()), "what is whole ends"
            assert self.reader.behind or not self.wire.paused, "and who is not behind is read for"
            return
        if self.task.cancelled() or self.task.exception() is not None:
            assert self.reader.left
            assert self.task.cancelled() or isinstance(self.task.exception(), ConnectionResetError)
        elif self.task.result():
            # Where the end of the connection is the end of the body, a cut looks like one: `EventStream` knows better.
            assert whole or (not self.framed and self.wire.lost)
        else:
            assert self.wire.lost
        assert self.wire.lost or self.wire.protocol is self.parser, "the connection is aiohttp's again"
        assert not asyncio.all_tasks(self.loop)

    @invariant()
    def a_reader_that_is_behind_holds_up_the_engine(self) -> None:
        if hasattr(self, "task") and self.reader.behind and not self.task.done() and self.kept_connection:
            assert self.wire.paused or self.wire.closed or self.content.is_eof()

    @invariant()
    def nothing_is_left_for_the_loop_to_complain_of(self) -> None:
        assert self.complaints == []

    def teardown(self) -> None:
        if hasattr(self, "task"):
            self.reader_catches_up()
            if not self.task.done():
                self.engine_is_cut(None)
                assert self.task.done()
            if not self.task.cancelled():
                self.task.exception()
            self._run(asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    # How time passes.

    def _all_parsed(self) -> bool:
        return self.wire.delivered + self._sent_with_head() >= len(self.wire_bytes) and not self.wire.in_kernel

    def _sent_with_head(self) -> int:
        return self.sent - self.wire.delivered - len(self.wire.in_kernel)

    def _call(self, act: Callable[[], object]) -> None:
        async def once() -> None:
            act()

        self._run(once())
        self._turn()

    def _turn(self) -> None:
        """Until nothing moves any more."""

        async def turns() -> None:
            for _ in range(4):
                await asyncio.sleep(0)
            while (self.wire.in_kernel and not self.wire.paused and not self.wire.lost) or (
                self.wire.closed and not self.wire.lost
            ):
                self.wire.step()
                for _ in range(4):
                    await asyncio.sleep(0)

        self._run(turns())

    def _run(self, what: Any) -> None:
        self.loop.run_until_complete(what)


TestRelay = RelayMachine.TestCase
TestRelay.settings = settings(
    max_examples=120, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
