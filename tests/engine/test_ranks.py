"""Several ranks compute one model: the same tokens as one, whatever the schedule, and no rank outlives the others."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.reference import Reference, greedy, outputs, run
from sluice_engine.compute.assembly import assemble_runner
from sluice_engine.compute.loading import Opened
from sluice_engine.compute.ranks import Ranks, ending
from sluice_engine.compute.runner import TorchRunner
from sluice_engine.compute.step_message import Share, StepMessage
from sluice_engine.config import AdaptersConfig, AdapterSource, CacheConfig, EngineConfig, ModelConfig, ModelSource
from sluice_engine.core.loop import RunnerFailed
from sluice_engine.core.plan import NO_POSITIONS, NOBODY, ScheduledRequest, StepPlan, StepResult
from sluice_engine.core.request import Outcome, Request, SamplingParams
from sluice_engine.errors import InvalidConfig, ModelUnavailable
from sluice_engine.kernels.library import SWITCH
from sluice_engine.serving.publication import LoadedEngine
from sluice_engine.serving.service import EngineService
from tiny_model import make_tiny_llama


class Engine:
    """A runner of several ranks on the CPU, and what it said of one that was lost."""

    def __init__(self, model: Path, ranks: int, folder: Path) -> None:
        self.lost: list[tuple[str, str]] = []
        self.told = threading.Event()
        config = EngineConfig(
            model=ModelConfig(source=ModelSource(path=str(model)), served_name="test", data_type="Float32"),
            cache=CacheConfig(capacity_bytes=1 << 20, block_tokens=8, host_swap_bytes=1 << 19),
            tensor_parallel=ranks,
            socket_path=str(folder / "s"),
        )
        self.runner = assemble_runner(config, lambda _progress: None, self._lost)

    @property
    def pids(self) -> tuple[int, ...]:
        assert self.runner._ranks is not None
        return self.runner._ranks.pids

    def _lost(self, code: str, words: str) -> None:
        self.lost.append((code, words))
        self.told.set()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    """Of a width that own kernels compute, also when it is halved; the head's rows do not divide by two or four."""
    return make_tiny_llama(folder / "tiny", hidden_size=128, intermediate_size=256, tied_head=False, vocab_size=263)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference.from_directory(tiny)


@pytest.fixture(scope="class")
def two(tiny: Path, folder: Path) -> Iterator[Engine]:
    engine = Engine(tiny, 2, folder)
    yield engine
    engine.runner.close()
    assert not engine.lost, "an end that was asked for is no loss"
    assert all(gone(pid) for pid in engine.pids)
    assert not (folder / "s.ranks").exists()


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


class TestTwoRanks:
    """One engine for all: a process is in one group at a time."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({}, id="undisturbed"),
            pytest.param({"chunk": 7, "token_budget": 24, "max_sequences": 8}, id="chunked"),
            pytest.param({"num_blocks": 14, "chunk": 16}, id="preempted, computed again"),
            pytest.param({"num_blocks": 14, "chunk": 16, "swap": True}, id="preempted, swapped"),
            pytest.param({"prefix": True, "max_sequences": 2}, id="prefix hits"),
            pytest.param({"depth": 2, "chunk": 9}, id="overlapped"),
            pytest.param({"drafts": 3}, id="speculative"),
        ],
    )
    def test_they_say_what_one_says(self, two: Engine, reference: Reference, options: dict[str, object]) -> None:
        prompts = [_prompt(seed % 3, length) for seed, length in enumerate((1, 9, 17, 40, 41, 60))]
        requests = [greedy(str(i), prompt, max_tokens=16) for i, prompt in enumerate(prompts)]
        scheduler = run(two.runner, requests, **options)  # type: ignore[arg-type]  # a table of keywords
        for prompt, output in zip(prompts, outputs(requests), strict=True):
            reference.assert_greedy(prompt, output)
        if "num_blocks" in options:
            assert scheduler.preemptions_total


class Killing:
    """A runner one of whose other ranks dies before its fifth step."""

    def __init__(self, runner: TorchRunner, pid: int) -> None:
        self._runner = runner
        self._pid = pid
        self._steps = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        if self._steps == 5:
            os.kill(self._pid, signal.SIGKILL)
        return self._runner.execute(plan)


@pytest.mark.slow
def test_four_ranks_say_what_one_says_until_one_of_them_dies_which_ends_the_engine_with_its_name(
    tiny: Path, reference: Reference, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without own kernels; the last rank has 65 rows of the head, the others 66. One start for both: it takes long."""
    monkeypatch.setenv(SWITCH, "off")
    engine = Engine(tiny, 4, folder)
    requests = [greedy(str(i), _prompt(i, length), max_tokens=16) for i, length in enumerate((1, 17, 60))]
    run(engine.runner, requests, chunk=16)

    for i, (request, output) in enumerate(zip(requests, outputs(requests), strict=True)):
        reference.assert_greedy(_prompt(i, request.num_prompt), output)
    assert len(engine.runner.rank_bytes) == 4

    requests = [greedy(str(i), _prompt(i, 20), max_tokens=64) for i in range(3)]
    words = f"rank 2 of 4 (process {engine.pids[1]}) was killed by SIGKILL"
    with pytest.raises(RunnerFailed, match=re.escape(words)) as caught:
        run(Killing(engine.runner, engine.pids[1]), requests)  # type: ignore[arg-type]  # it is one in all that is asked of it
    engine.runner.close()

    assert [emission.outcome for emission in caught.value.emissions] == [Outcome.FAILED] * 3
    assert engine.lost == [("RankFailed", words)]
    assert all(gone(pid) for pid in engine.pids)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_rank_that_does_not_start_is_one_line(tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for python, says in (
        ("/bin/false", r"rank 1 of 2 \(process \d+\) ended with status 1"),
        ("/none", "cannot be started"),
    ):
        monkeypatch.setattr("sys.executable", python)
        with pytest.raises(ModelUnavailable, match=says) as caught:
            Engine(tiny, 2, folder)
        assert caught.value.code == "RankFailed"


def test_a_rank_that_dies_while_the_ranks_meet_is_named(
    tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's own error comes first."""

    def broken(*_arguments: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr("sys.executable", "/bin/false")
    monkeypatch.setattr(Ranks, "answers", lambda _ranks: [])
    monkeypatch.setattr(Opened, "load", broken)
    with pytest.raises(ModelUnavailable, match=r"rank 1 of 2 \(process \d+\) ended with status 1"):
        Engine(tiny, 2, folder)


# A rank that says that a step failed, and ends; and one that dies after that, or lives on.
_RANK = """#!{python}
import os, signal, sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-1]))
rank = pipe.recv()[0]
if rank == 1:
    gone = os.open("{fifo}", os.O_WRONLY) if {dies} else None
    pipe.send(("failed", "RankFailed", "rank 1 failed: RuntimeError: connection closed by peer"))
    os._exit(1)
if {dies}:
    os.read(os.open("{fifo}", os.O_RDONLY), 1)  # until the other has said so, and is gone
    os.kill(os.getpid(), signal.SIGKILL)
try:
    pipe.recv()
except EOFError:
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("dies", "says"),
    [
        pytest.param(True, r"rank 2 of 3 \(process \d+\) was killed by SIGKILL", id="another's death"),
        pytest.param(False, "rank 1 failed: RuntimeError: connection closed by peer", id="its own failure"),
    ],
)
def test_a_rank_that_failed_by_another_s_death_is_not_named_for_it(
    tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, says: str, *, dies: bool
) -> None:
    fifo, program = folder / f"fifo-{dies}", folder / f"rank-{dies}"
    os.mkfifo(fifo)
    program.write_text(_RANK.format(python=sys.executable, fifo=fifo, dies=dies))
    program.chmod(0o700)
    model = ModelConfig(source=ModelSource(path=str(tiny)), served_name="test")
    config = EngineConfig(model=model, tensor_parallel=3, socket_path=str(folder / "s"))
    lost: list[tuple[str, str]] = []
    told = threading.Event()
    monkeypatch.setattr("sys.executable", str(program))

    def tell(code: str, words: str) -> None:
        lost.append((code, words))
        told.set()

    ranks = Ranks(config, tell)
    assert told.wait(60)
    ranks.close()
    ((code, words),) = lost
    assert code == "RankFailed"
    assert re.fullmatch(says, words)


async def test_an_engine_that_lost_a_rank_fails_though_its_thread_is_stuck() -> None:
    """NCCL waits for a rank that has died; what its thread says later is no cause."""
    freed = threading.Event()

    def load(_progress: object) -> LoadedEngine:
        freed.wait()
        raise ModelUnavailable("the group is broken")

    service = EngineService(load, lambda: 0)
    service.start()
    await asyncio.to_thread(service.lose, "RankFailed", "rank 1 is gone")
    await service.ended()
    assert (service.phase, service.failure, service.thread_alive()) == (
        "failed",
        ("RankFailed", "rank 1 is gone"),
        True,
    )

    freed.set()
    while service.thread_alive():  # noqa: ASYNC110  # a thread
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert service.failure == ("RankFailed", "rank 1 is gone")


def test_what_a_step_is_told_with_is_small() -> None:
    """A thousand decodes: 24 bytes each."""
    numbers = np.arange(1000)
    message = StepMessage((), numbers, numbers, numbers, ())

    assert len(pickle.dumps(message)) < 24 * 1000 + 1000


def test_a_follower_s_shares_are_those_of_the_plan() -> None:
    """Guesses too: the rows after which a token is sampled, and what each ends with."""
    request = Request("r", list(range(50)), 50, SamplingParams(max_tokens=4, temperature=0.0), 0)
    for chunk in (
        ScheduledRequest(request, 0, 3, 10, 20, samples=False),
        ScheduledRequest(request, 0, 3, 49, 1, samples=True),
        ScheduledRequest(request, 0, 3, 49, 4, samples=True, drafts=(7, 8, 9)),
    ):
        plan = StepPlan(0, NOBODY, NO_POSITIONS, (chunk,), 0, 0)
        (piece,) = StepMessage.of(plan, NO_POSITIONS).pieces

        def told(share: Share) -> list[tuple[object, ...]]:
            return [
                (one.slot, one.start, one.num_tokens, one.tokens, one.num_sampled) for one in (share, *share.sampling())
            ]

        assert told(piece)[0] == told(chunk)[0]
        assert [row[:4] for row in told(piece)[1:]] == [row[:4] for row in told(chunk)[1:]]


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (1, "ended with status 1"),
        (-9, "was killed by SIGKILL"),
        (-100, "was killed by signal 100"),
        (None, "no longer answers"),
    ],
)
def test_how_a_process_ended_is_said_in_words(status: int | None, says: str) -> None:
    assert ending(status) == says


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        pytest.param(3, "tensor_parallel: is 3, but the model has 4 KV heads, which do not divide", id="three"),
        pytest.param(
            8, "tensor_parallel: is 8, but the model has 4 KV heads, which do not divide", id="more than heads"
        ),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_a_process_starts(
    tiny: Path, folder: Path, ranks: int, says: str
) -> None:
    with pytest.raises(InvalidConfig, match=says):
        Engine(tiny, ranks, folder)


@pytest.mark.parametrize(
    ("count", "ranks", "says"),
    [
        (9, 9, "accelerator_count: must be 0 (CPU) to 8, not 9"),
        (2, 1, "tensor_parallel: is 1, and accelerator_count 2: a rank has one GPU"),
        (0, 0, "tensor_parallel: must be 1 to 8, not 0"),
    ],
)
def test_ranks_and_devices_that_do_not_agree_are_refused(tiny: Path, count: int, ranks: int, says: str) -> None:
    model = ModelConfig(source=ModelSource(path=str(tiny)), served_name="test")
    with pytest.raises(InvalidConfig, match=re.escape(says)):
        EngineConfig(model=model, accelerator_count=count, tensor_parallel=ranks)


@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (0, 2)])
@pytest.mark.parametrize(
    "adapters",
    [AdaptersConfig(directory="/adapters"), AdaptersConfig(preloaded=(AdapterSource(name="a", path="/a"),))],
    ids=["a-directory", "preloaded"],
)
def test_adapters_over_several_ranks_are_refused_by_both_names(
    tiny: Path, adapters: AdaptersConfig, count: int, ranks: int
) -> None:
    model = ModelConfig(source=ModelSource(path=str(tiny)), served_name="test")
    says = "adapters: run on one device alone, and tensor_parallel is 2: leave them out"
    with pytest.raises(InvalidConfig, match=re.escape(says)):
        EngineConfig(model=model, adapters=adapters, accelerator_count=count, tensor_parallel=ranks)
