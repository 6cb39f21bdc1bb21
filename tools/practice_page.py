"""The practice of four requests as a section of the page of worked examples.

Owns the words about it, and how a step of it is priced; `practice.py` plays it. Start reading at `practice_section`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from page import ms, table
from practice import FOUR, TOKEN_BUDGET, UNITS, Arrival, Line, Rules, Schedule, alone, play
from sluice_engine.core.steptime import PlanningProfile

PROFILE = PlanningProfile()
PROMISE_US = 150_000
# A slot of the practice stands for so many tokens where its steps are priced: 16 slots are then 3,200 tokens, just
# below the ceiling of 3,428.
TOKENS_PER_SLOT = 200

VARIANTS = (
    Rules(title="First come, first served, prefill never split", chunk=None),
    Rules(title="First come, first served, chunks of eight"),
    Rules(title="Priority with aging, chunks of eight", policy="Priority", victim="LowestPriority", aging_steps=4),
)


def practice_section() -> str:
    """The section on requests A to D."""
    schedules = [play(rules) for rules in VARIANTS]
    parts = [_PRACTICE_HEAD.strip(), _requests()]
    for schedule in schedules:
        parts += [f"### {schedule.rules.title}", _steps(schedule), _remark(schedule)]
    parts += ["### What came of it", _results(schedules), "### When D must be rejected", _rejections(schedules)]
    return "\n\n".join(parts)


_PRACTICE_HEAD = f"""
## Practice: four requests, 16 slots, {UNITS} units

A step has {TOKEN_BUDGET} token slots, live state has {UNITS} units, one a token. What the text leaves open, and what is chosen here:

- Arrivals count steps: C comes before step 1 is planned, D before step 2.
- The last token never holds state, so a request needs `prompt + output − 1` units. A request enters when its whole prompt has
  room; what it grows by is not reserved, so the engine may have to preempt.
- Priorities, used by the third variant only: C 0, B 2, A 4, D 6, one level of aging in 4 steps; there the victim of a preemption
  is the least urgent, otherwise who loses least. A preempted request gives up its state and computes it again.
- The text names no deadlines. Here everybody has twice the steps that it needs alone with chunks of eight.
- Durations: a slot of prefill stands for {TOKENS_PER_SLOT} tokens, so that {TOKEN_BUDGET} slots are {TOKEN_BUDGET * TOKENS_PER_SLOT:,} tokens, within the ceiling of
  3,428; a decode is one token. Step times are the planning profile's, the promise is {ms(PROMISE_US)} between tokens.
"""


def _requests() -> str:
    rows = [
        (one.name, str(one.step), str(one.prompt), str(one.output), str(one.need), str(alone(one)), str(_deadline(one)))
        for one in FOUR
    ]
    header = ("", "arrives", "prompt", "output", "needs units", "steps alone", "deadline, in steps")
    return table(header, rows) + f"\n\nTogether they need {sum(one.need for one in FOUR)} units, and there are {UNITS}."


def _deadline(arrival: Arrival) -> int:
    return 2 * alone(arrival)


def _duration_us(line: Line) -> int:
    prefill = sum(tokens for _, tokens in line.prefills)
    return PROFILE.predict_us(len(line.decodes), prefill * TOKENS_PER_SLOT, 0)


def _steps(schedule: Schedule) -> str:
    def row(line: Line) -> tuple[str, ...]:
        contents = [f"{name} prefill {tokens}" for name, tokens in sorted(line.prefills)]
        contents += [f"{', '.join(line.decodes)} decode"] if line.decodes else []
        events = [
            f"{one.request_id} preempted for {one.beneficiary_id}, {one.num_computed} units lost"
            for one in line.preempted
        ]
        events += [f"first token of {name}" for name, step in schedule.first_token.items() if step == line.number]
        events += [f"{name} ends" for name in line.ended]
        slots = f"**{line.tokens}**" if line.tokens > TOKEN_BUDGET else str(line.tokens)
        waiting = ", ".join(line.waiting)
        cells = (str(line.number), "; ".join(contents), slots, str(line.held_units), waiting, "; ".join(events))
        return (*cells, ms(_duration_us(line)))

    header = ("step", "contents", "slots", "units held", "waiting", "what happens", "takes")
    return table(header, map(row, schedule.lines))


def _remark(schedule: Schedule) -> str:
    if schedule.rules.chunk is None:
        over = [line for line in schedule.lines if line.tokens > TOKEN_BUDGET]
        slow = max((_duration_us(line), line.number) for line in schedule.lines if line.decodes)
        assert all(dict(line.prefills)[name] >= one.prompt for line in schedule.lines for one in FOUR
                   for name, _ in line.prefills if name == one.name), "a prefill was split"  # fmt: skip
        return (
            f"A prefill that is never split is atomic: 24 tokens do not fit into {TOKEN_BUDGET} slots. Either A and D can never run, or "
            f"they overrun the budget. Here they do, in steps {' and '.join(str(line.number) for line in over)}: D's beside the "
            f"decodes, which makes step {slow[1]} {ms(slow[0])} long, past the {ms(PROMISE_US)} that are promised between tokens. "
            "The engine has no such mode: it always chunks. For this table the generator opened the budget of those two steps."
        )
    if schedule.rules.policy == "FirstComeFirstServed":
        slow = max((_duration_us(line), line.number) for line in schedule.lines if line.decodes)
        return (
            "B decodes from step 1 on beside A's chunks. The text's third picture has A's chunk and the decodes of B and C in this "
            "step 2; it leaves out C's own prefill, which has to come first: 7 slots were left for it in step 1, one token in step 2. "
            f"No step with decodes takes longer than {ms(slow[0])}. The units run out in step 3, and B, which has the least to lose, gives way."
        )
    return (
        "C found a slot and room when it came, so its priority changes nothing about its entry. It shows when the units run out: the "
        "victim is A, the least urgent that runs, with all of its 24 units, where the other policies take B's few. B and C run as "
        "if they were alone; A and D pay. While D waits it gains a level in 4 steps, but A, which came before and ages alike, stays ahead."
    )


def _results(schedules: list[Schedule]) -> str:
    rows = []
    for schedule in schedules:
        ends_us = _ends_us(schedule)
        good = [one for one in FOUR if schedule.latency(one) <= _deadline(one)]
        steps, total_us = len(schedule.lines), max(ends_us.values())
        gaps_us = [_duration_us(line) for line in schedule.lines if line.decodes]
        rows.append(
            (
                schedule.rules.title,
                ", ".join(f"{one.name} {schedule.ttft(one)}" for one in FOUR),
                ", ".join(f"{one.name} {_first_us(schedule, one, ends_us) / 1000:,.0f}" for one in FOUR),
                ", ".join(f"{one.name} {schedule.latency(one)}" for one in FOUR),
                f"{len(good)} of 4 in {steps} steps, {len(good) * 1e6 / total_us:.1f} a second",
                ", ".join(f"{one.request_id} (step {step})" for step, one in schedule.preemptions),
                f"{max(line.held_units for line in schedule.lines)} of {UNITS}",
                ms(max(gaps_us)),
            )
        )
    header = (
        "", "TTFT, steps", "TTFT, ms", "last token, steps", "good by the deadline", "preempted", "most units held",
        "longest step with decodes",
    )  # fmt: skip
    without = [play(rules, FOUR[:3]) for rules in VARIANTS]
    freed = "; ".join(
        f"{rules.title.split(',')[0].lower() if rules.policy == 'Priority' else rules.title.rpartition(', ')[2]}: "
        f"{', '.join(f'{one.name} {schedule.latency(one)}' for one in FOUR[:3])}"
        for rules, schedule in zip(VARIANTS, without, strict=True)
    )
    return table(header, rows) + (
        "\n\nGoodput counts requests whose last token came within their deadline. Chunks cost A two steps of its first token and keep "
        "every stream within the promise; not splitting is quicker here and breaks it. Priority keeps B and C at their best and gives "
        f"up D's deadline.\n\nWith D rejected at arrival the last tokens come after ({freed}) steps."
    )


def _ends_us(schedule: Schedule) -> dict[int, int]:
    """When each step ends, in µs from the beginning; steps without work take one fixed part."""
    ends, now_us = {}, 0
    ran = {line.number: line for line in schedule.lines}
    for number in range(max(ran) + 1):
        now_us += _duration_us(ran[number]) if number in ran else PROFILE.fixed_us
        ends[number] = now_us
    return ends


def _first_us(schedule: Schedule, arrival: Arrival, ends_us: dict[int, int]) -> int:
    begun_us = ends_us[arrival.step - 1] if arrival.step else 0
    return ends_us[schedule.first_token[arrival.name]] - begun_us


def _rejections(schedules: list[Schedule]) -> str:
    d = FOUR[3]
    rows = []
    for schedule in schedules:
        least, kept = alone(d, schedule.rules.chunk), schedule.latency(d)
        told = "it waits outside: not played"
        if schedule.rules.chunk is not None:
            told = "; ".join(_ranges(_told(schedule.rules, deadline) for deadline in range(1, kept + 1)))
        rows.append((schedule.rules.title, f"below {kept}", f"below {least}", f"{kept} and more", told))
    header = ("", "must be rejected at arrival", "of these not even an idle engine could keep", "can be kept",
              "what the order does with D, let in all the same")  # fmt: skip
    return (
        "The text gives D no deadline; so here is which one decides, in steps from its arrival to its last token.\n\n"
        + table(header, rows)
        + "\n\nBelow the first bound what was admitted before holds the units for too long, and D must be rejected when it comes: "
        "that is the gate's decision, since it takes a look ahead. The order itself has none. Let in all the same, D leaves it "
        "as soon as even an immediate start would be too late, with an outcome of its own and without a token of prefill: the "
        "engine pays nothing, but D has waited in vain."
    )


def _told(rules: Rules, deadline: int) -> tuple[int, str]:
    """What becomes of D with this deadline, once it is let in."""
    d = FOUR[3]
    schedule = play(rules, deadlines={d.name: deadline})
    if (step := schedule.expired.get(d.name)) is not None:
        return deadline, "expires at arrival" if step == d.step else "expires in the queue"
    return deadline, "is served in time" if schedule.latency(d) <= deadline else "runs and is late"


def _ranges(told: Iterable[tuple[int, str]]) -> Iterator[str]:
    for what, some in itertools.groupby(told, key=lambda one: one[1]):
        deadlines = [deadline for deadline, _ in some]
        yield f"{deadlines[0]} to {deadlines[-1]}: {what}" if len(deadlines) > 1 else f"{deadlines[0]}: {what}"
