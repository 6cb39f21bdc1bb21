"""Break the scheduler's rules one by one, and show for each that a test turns red.

    python tools/mutate_core.py            all mutations; exit 1 when one survives
    python tools/mutate_core.py fence      those whose name holds the word

A mutation is a text in a file of the core that is replaced by another, in a copy; the tests named beside it are run
against the copy. A test holds the list to the code: each text occurs exactly once (tests/repo/test_mutations.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "engine_image/src"
CORE = "sluice_engine/core"
WINDOW = "tests/engine/test_overlap.py"
BUDGETS = "tests/engine/test_budgets.py"
DRAFTS = "tests/engine/test_drafts.py"
STEPS = "tests/engine/test_scheduler.py"
CLASSES = "tests/engine/test_policies.py"
CONTAINED = "tests/engine/test_containment.py"
DEADLINES = "tests/engine/test_deadlines.py"
ENTRY = "tests/engine/test_entry.py"
NEEDS = "tests/engine/test_needs.py"
ORDERS = "tests/engine/test_order.py"
FAIR = "tests/engine/test_fair.py"
VICTIMS = "tests/engine/test_preemption.py"
PREFIX = "tests/engine/test_prefix_cache.py"
HOST = "tests/engine/test_host_pool.py"
SHARING = "tests/engine/test_sharing.py"

# The tests of one mutation take seconds.
HANGS_AFTER_S = 120


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule taken away."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTATIONS = (
    # Budgets: what is undone gives back all it took.
    Mutation(
        "an undone request keeps its budgets",
        "budgets.py",
        "            self._change(needs, -1)\n            for",
        "            for",
        (BUDGETS,),
    ),
    Mutation(
        "an adapter is given back while another uses it",
        "budgets.py",
        "                if users:\n                    self._users",
        "                if users > 99:\n                    self._users",
        (BUDGETS,),
    ),
    Mutation(
        "a victim stays in the step that preempted it",
        "ladder.py",
        "        step.take_back(victim)\n",
        "",
        (CLASSES, STEPS),
    ),
    Mutation(
        "an undone decode keeps its token",
        "step.py",
        "            self.budgets.take_back_for_each(gone, DECODE_NEEDS)\n",
        "",
        (BUDGETS,),
    ),
    Mutation(
        "an undone decode keeps its context",
        "step.py",
        "            self.context -= before - int(self.starts.sum()) + gone\n",
        "",
        (BUDGETS,),
    ),
    Mutation(
        "an undone chunk is still computed",
        "step.py",
        "start, num_tokens = self.chunks.pop(request, (0, 0))",
        "start, num_tokens = self.chunks.get(request, (0, 0))",
        (BUDGETS, CLASSES),
    ),
    Mutation(
        "an undone chunk is still priced",
        "step.py",
        "        self.prior_pairs -= start * num_tokens\n",
        "",
        (BUDGETS,),
    ),
    Mutation(
        "a request that leaves keeps its place among the running",
        "running.py",
        ", self._release, self._held.take_back)",
        ", self._release)",
        (STEPS,),
    ),
    # Fences: no block changes hands while a step may write it.
    Mutation(
        "blocks of a request in flight are free at once",
        "running.py",
        "fence=self._window.newest_step",
        "fence=None",
        (WINDOW,),
    ),
    Mutation(
        "a fence falls with the first step that is settled",
        "blocks.py",
        "                if fence <= step:\n",
        "                if fence:\n",
        (WINDOW,),
    ),
    Mutation(
        "fenced blocks are never free again",
        "settlement.py",
        "            self._pool.settled(plan.step)\n",
        "",
        (WINDOW,),
    ),
    # Stale results are dropped.
    Mutation(
        "a decode's stale token is applied",
        "settlement.py",
        "applies = rows.tenure[slots] == batch.tenures",
        "applies = rows.tenure[slots] >= 0",
        (WINDOW,),
    ),
    Mutation(
        "a chunk's stale result is applied",
        "settlement.py",
        "return request.status is RequestStatus.RUNNING and request.incarnation == entry.incarnation",
        "return request.status is RequestStatus.RUNNING",
        (STEPS,),
    ),
    Mutation(
        "a result that comes twice is taken twice",
        "window.py",
        "if result.step not in self._plans or result.step in self._early:",
        "if result.step not in self._plans:",
        (WINDOW,),
    ),
    Mutation(
        "a slot that is left keeps its number of tenure",
        "rows.py",
        "        self.tenure[slot] = 0\n",
        "",
        (WINDOW,),
    ),
    Mutation(
        "results are settled as they come",
        "window.py",
        "            step = next(iter(self._plans))\n",
        "            step = next(iter(self._early), 0)\n",
        (WINDOW,),
    ),
    # What must be settled first.
    Mutation(
        "a victim may be in flight",
        "ladder.py",
        '            if len(self._window):\n                raise DrainFirst("preemption")\n',
        "",
        (WINDOW,),
    ),
    Mutation(
        "a penalised decode is planned before its token is known",
        "scheduler.py",
        '        if self.rows.decodes().penalised:\n            return "host_tokens"\n',
        "",
        (WINDOW,),
    ),
    Mutation(
        "stranded blocks do not close the window",
        "scheduler.py",
        "(self.pool.num_fenced + self.window.optimistic_blocks) * STRANDED_SHARE > self.pool.num_blocks",
        "False",
        (WINDOW,),
    ),
    Mutation(
        "the window has no depth",
        "scheduler.py",
        "        if len(self.window) > self.depth:\n",
        "        if len(self.window) > 9:\n",
        (WINDOW,),
    ),
    Mutation(
        "a step is planned for a request whose last token is in flight",
        "running.py",
        "return min(len(request.blocks) * self.pool.block_tokens, request.peak_tokens)",
        "return len(request.blocks) * self.pool.block_tokens",
        (WINDOW,),
    ),
    # Deadlines and faults.
    Mutation(
        "nobody watches the deadline of a running request",
        "running.py",
        "        self._deadlines.watch(request)\n",
        "",
        (CLASSES, DEADLINES),
    ),
    Mutation(
        "one request's fault takes the others down while planning",
        "scheduler.py",
        "        if self.strict:\n            raise error\n",
        "        raise error\n",
        (CONTAINED,),
    ),
    Mutation(
        "a request that failed leaves its blocks to others",
        "running.py",
        "self._share if sound else self.prefix.forget",
        "self._share",
        ("tests/engine/test_sharing.py",),
    ),
    # Order and entry.
    Mutation(
        "a request is overtaken for ever",
        "entry.py",
        " or request.num_overtaken >= MAX_OVERTAKEN",
        "",
        (ENTRY,),
    ),
    Mutation(
        "the look past has no end",
        "entry.py",
        "len(passed) > LOOK_PAST or ",
        "",
        (ENTRY,),
    ),
    Mutation(
        "a long prompt takes the whole step",
        "shares.py",
        "        left -= min(left // 2, max(0, wanted_behind))\n",
        "",
        (ENTRY,),
    ),
    Mutation(
        "what was kept for others and not used is lost",
        "scheduler.py",
        "        self._shares.share_out_the_rest(step)\n",
        "",
        (ENTRY,),
    ),
    Mutation(
        "entry is open again right after a preemption",
        "ladder.py",
        "        self.latched_for = blocks_for(victim.num_tokens, pool.block_tokens)\n",
        "",
        (STEPS,),
    ),
    Mutation(
        "a resumed request is not protected",
        "running.py",
        "            request.protected_until = request.num_tokens\n",
        "            request.protected_until = 0\n",
        ("tests/engine/test_preemption.py",),
    ),
    Mutation(
        "entry looks at free blocks without those of the prefix that nobody holds",
        "running.py",
        "return own + hit.num_unused - self.pool.num_free",
        "return own - self.pool.num_free",
        (ENTRY,),
    ),
    # What each order and each victim policy promises.
    Mutation(
        "work without hope is not given up while it waits",
        "scheduler.py",
        "late = [*self.waiting.expired(now_us), *self._running.overdue(now_us)]",
        "late = [*self._running.overdue(now_us)]",
        (CLASSES,),
    ),
    Mutation(
        "a running request outlives its deadline",
        "scheduler.py",
        ", *self._running.overdue(now_us)]",
        "]",
        (CLASSES,),
    ),
    Mutation(
        "waiting counts for nothing",
        "order/keyed.py",
        "return lambda request: request.priority * aging_interval_us + request.arrival_us",
        "return lambda request: request.priority",
        (ORDERS,),
    ),
    Mutation(
        "nobody waits too long",
        "order/keyed.py",
        "            if request.arrival_us + self._guard_us > now_us:\n                break\n",
        "            break\n",
        (ORDERS,),
    ),
    Mutation(
        "a preempted request has lost its place",
        "order/waiting.py",
        "if request.place < 0:",
        "if True:",
        (ORDERS,),
    ),
    Mutation(
        "an idle tenant saves up",
        "order/fair.py",
        "            account.virtual = max(account.virtual, self._virtual_time)\n            self._enqueue",
        "            self._enqueue",
        (FAIR,),
    ),
    Mutation(
        "what a tenant was booked for is never given back",
        "order/fair.py",
        "        account.add(-booking.left)\n",
        "",
        (FAIR,),
    ),
    Mutation(
        "a tenant's requests leave without paying",
        "running.py",
        "(self._charge, self._share if",
        "(self._share if",
        (CLASSES,),
    ),
    Mutation(
        "one level takes a place",
        "preemption.py",
        "request.priority - entering.priority >= CLASS_LEVELS",
        "request.priority - entering.priority >= 1",
        (VICTIMS,),
    ),
    Mutation(
        "a request at its cap of preemptions is chosen again",
        "preemption.py",
        "return request.num_preemptions < max_preemptions and ",
        "return ",
        (VICTIMS,),
    ),
    # Adapters: whoever waits for one delays nobody, and does not wait for ever.
    Mutation(
        "who waits for an adapter hides who waits for none",
        "entry.py",
        "LOOK_PAST_ADAPTERS = 64",
        "LOOK_PAST_ADAPTERS = 4",
        (NEEDS,),
    ),
    Mutation(
        "an adapter that never rests keeps another out for ever",
        "entry.py",
        "                adapters_shut |= request.num_overtaken >= MAX_OVERTAKEN\n",
        "",
        (NEEDS,),
    ),
    Mutation(
        "one adapter's blocks are found with another",
        "prefix_cache.py",
        "_root(request.tenant, request.adapter, size)",
        '_root(request.tenant, "", size)',
        (PREFIX,),
    ),
    # Shared blocks, and state on the host.
    Mutation(
        "a head is dropped before the tails that hang on it",
        "blocks.py",
        "            self._unused.move_to_end(found)\n",
        "            pass\n",
        (PREFIX,),
    ),
    Mutation(
        "blocks are given back head first",
        "blocks.py",
        "        for block in reversed(table):\n",
        "        for block in table:\n",
        (PREFIX,),
    ),
    Mutation(
        "the block that was used last is dropped first",
        "blocks.py",
        "self._unused.popitem(last=False)",
        "self._unused.popitem()",
        (PREFIX,),
    ),
    Mutation(
        "a dropped block can still be found",
        "blocks.py",
        "        del self._by_key[key]\n        self.dropped_total",
        "        self.dropped_total",
        (PREFIX,),
    ),
    Mutation(
        "a hit leaves nothing to compute",
        "prefix_cache.py",
        "(request.num_tokens - 1) // block_tokens",
        "request.num_tokens // block_tokens",
        (PREFIX,),
    ),
    Mutation(
        "tenants find each other's blocks",
        "prefix_cache.py",
        'f"{block_tokens} {tenant}"',
        'f"{block_tokens}"',
        (PREFIX,),
    ),
    Mutation(
        "what comes back is counted as a hit",
        "prefix_cache.py",
        "        if request.num_preemptions:\n",
        "        if request.num_preemptions > 99:\n",
        (PREFIX,),
    ),
    Mutation(
        "what a failed request computed is found by others",
        "running.py",
        "self._share if sound else self.prefix.forget",
        "self._share",
        (SHARING,),
    ),
    Mutation(
        "host blocks are given away in the step that reads them",
        "host_pool.py",
        "release(request.host_blocks, fence=step)",
        "release(request.host_blocks)",
        (HOST,),
    ),
    Mutation(
        "host blocks that were read are never free again",
        "suspension.py",
        "        self.host.settled(step)\n",
        "",
        (SHARING,),
    ),
    Mutation(
        "one that ended leaves its state on the host",
        "suspension.py",
        "        self._since_us.pop(request, None)\n        self.host.drop(request)\n",
        "        self._since_us.pop(request, None)\n",
        (SHARING,),
    ),
    Mutation(
        "what a failed step copied out is trusted",
        "settlement.py",
        "            lost |= dict.fromkeys(self._suspension.failed(plan.step))\n",
        "",
        (SHARING,),
    ),
    Mutation(
        "copies out are made again by the next step",
        "suspension.py",
        "        self._out.clear()\n",
        "",
        (SHARING,),
    ),
    Mutation(
        "copies in are made again by the next step",
        "suspension.py",
        "        self._in.clear()\n",
        "",
        (SHARING,),
    ),
    Mutation(
        "what was found in the cache is copied over",
        "host_pool.py",
        "zip(request.blocks[first:], request.host_blocks[first:], strict=False)",
        "zip(request.blocks, request.host_blocks, strict=False)",
        (SHARING,),
    ),
    Mutation(
        "a swapped request begins its chunk where the cache ends",
        "entry.py",
        "start = max(request.num_computed, hit.num_tokens)",
        "start = hit.num_tokens",
        (SHARING,),
    ),
    Mutation(
        "a guess after one that was wrong is kept",
        "settlement.py",
        "token_ids[: confirmed + 1]",
        "token_ids",
        (DRAFTS,),
    ),
    Mutation(
        "guesses are in flight while others are planned",
        "scheduler.py",
        "self.drafts is not None and self.drafts.pays",
        "False",
        (DRAFTS,),
    ),
    Mutation(
        "guesses take the blocks that decodes need next",
        "drafts.py",
        "free_blocks = self._running.pool.num_free - rows.num_running",
        "free_blocks = self._running.pool.num_free",
        (DRAFTS,),
    ),
    Mutation(
        "guesses are computed whatever they cost",
        "drafts.py",
        "if gained * without > LEAST_GAIN * decodes * (without + guessed * each_us):",
        "if True:",
        (DRAFTS,),
    ),
)


def survives(mutation: Mutation) -> bool:
    """Whether all tests stay green without the rule."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / CORE / mutation.file
        text = path.read_text()
        assert text.count(mutation.before) == 1, f"{mutation.name}: its text is not there exactly once"
        path.write_text(text.replace(mutation.before, mutation.after))
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=HANGS_AFTER_S
            )
        except subprocess.TimeoutExpired:
            return False  # it hangs: that is seen, too
        assert done.returncode in {0, 1}, done.stdout.decode()[-2000:]
        return done.returncode == 0


def main() -> int:
    words = sys.argv[1:]
    chosen = [mutation for mutation in MUTATIONS if all(word in mutation.name for word in words)]
    surviving = []
    for mutation in chosen:
        alive = survives(mutation)
        print(f"{'SURVIVES' if alive else 'red     '}  {mutation.file:14} {mutation.name}", flush=True)
        if alive:
            surviving.append(mutation)
    print(f"{len(chosen) - len(surviving)} of {len(chosen)} mutations turn a test red")
    return 1 if surviving or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
