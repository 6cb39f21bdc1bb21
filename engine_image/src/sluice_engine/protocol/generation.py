"""What both endpoints share: how tokens are drawn, how many answers, when they end, how they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sluice_engine.bodies import shown
from sluice_engine.core.request import SamplingParams
from sluice_engine.core.terms import FLEX
from sluice_engine.protocol.body import Fields, Inert, check_text, kind_of
from sluice_engine.protocol.structure import Structure, parse_structure

# OpenAI allows 4 stop strings, and n up to 128; each choice holds KV from its first token on, so fewer.
MAX_STOP_STRINGS = 4
MAX_N = 16
# Text that may become a stop string is held back, so its length bounds how far a stream lags.
MAX_STOP_CHARACTERS = 1024
# Logits are divided by it: far below this they leave float32, and no distribution is left to draw from.
LEAST_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10
# OpenAI's bounds.
MAX_PENALTY = 2
MAX_TEMPERATURE = 2
# What torch takes.
LEAST_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_PRIORITY = 1_000_000
# OpenAI's bounds of a bias; each entry is one operation on a row of logits in every step.
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100
MAX_STOP_TOKENS = 128
MAX_TOKEN_ID_DIGITS = 9

ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
TIERS: tuple[ServiceTier, ...] = get_args(ServiceTier)
# A bound for the field alone; whether it fits is checked once the prompt's tokens are counted.
MAX_TOKENS_BOUND = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The options of one call, bounds checked; None where the caller left the choice open."""

    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    """The name under which the caller gave it, for errors."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    behind: bool = False
    """Whether its caller puts it behind its own other requests."""
    logprobs: bool = False
    top_logprobs: int = 0
    structure: Structure | None = None
    """What each answer must look like."""
    service_tier: ServiceTier | None = None
    """The one that was asked for; None where none was."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether each chunk says the counts so far, as vLLM has it."""

    def sampling(self, *, max_tokens: int, seed: int, choice: int, eos_ids: frozenset[int]) -> SamplingParams:
        """One choice's parameters, with everything resolved that was left open."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            choice=choice,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            stop_token_ids=frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids),
            min_tokens=self.min_tokens,
            logit_bias=self.logit_bias,
            constrained=self.structure is not None,
        )

    @property
    def served_tier(self) -> str | None:
        """The tier in which a call is served: `flex` steps back, and nothing here is sold as more than the usual."""
        if self.service_tier is None:
            return None
        return FLEX if self.service_tier == FLEX else "default"


# Hints and labels: they steer OpenAI's own service and change no output.
SHARED_INERT = {
    "user": Inert(str),
    "metadata": Inert(dict),
    "store": Inert(bool, lambda value: value is False),
}


def parse_generation(fields: Fields, *, logprobs: bool, top_logprobs: int) -> Generation:
    """The options that both endpoints take; log probabilities are read by each in its own type.

    Raises:
        InvalidRequest: a type or a bound is broken, or a value is not supported.
    """
    fields.accept_inert(SHARED_INERT)
    structure, ignore_eos = parse_structure(fields), fields.flag("ignore_eos")
    if structure is not None and ignore_eos:
        fields.refuse("ignore_eos", f"is not allowed beside {structure.param}: its end is the answer's end")
    max_tokens, param = _max_tokens(fields)
    stream = fields.flag("stream")
    top_k = fields.integer("top_k", -1, MAX_TOKENS_BOUND)
    include_usage, continuous_usage = _usage(fields, stream=stream)
    return Generation(
        max_tokens=max_tokens,
        max_tokens_param=param,
        temperature=_or(fields.number("temperature", 0, MAX_TEMPERATURE), 1.0),
        top_p=_or(fields.number("top_p", 0, 1, above=True), 1.0),
        top_k=max(0, top_k or 0),  # -1 is how vLLM's clients say "all"
        min_p=_or(fields.number("min_p", 0, 1), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY), 0.0),
        presence_penalty=_or(fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY), 0.0),
        repetition_penalty=_or(
            fields.number("repetition_penalty", LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY), 1.0
        ),
        seed=fields.integer("seed", LEAST_SEED, MAX_SEED),
        n=fields.integer("n", 1, MAX_N) or 1,
        stop=_stop(fields),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOP_TOKENS) or (),
        ignore_eos=ignore_eos,
        min_tokens=_min_tokens(fields, max_tokens, param),
        logit_bias=_logit_bias(fields),
        # As with vLLM, lower is sooner and 0 the usual; a caller orders its own requests, and never leaves its class.
        behind=(fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0) > 0,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        structure=structure,
        service_tier=_service_tier(fields),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    old, new = (fields.integer(name, 1, MAX_TOKENS_BOUND) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        fields.refuse("max_tokens", f"is {old} while max_completion_tokens is {new}; give one of them")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    if not isinstance(value, (str, list)):
        fields.refuse("stop", f"must be a string or an array of strings, not {kind_of(value)}", "invalid_type")
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        fields.refuse("stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(value)}")
    texts = [value] if isinstance(value, str) else value
    for index, text in enumerate(texts):
        name = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(text, str):
            fields.refuse(name, f"must be a string, not {kind_of(text)}", "invalid_type")
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            fields.refuse(name, f"must be 1 to {MAX_STOP_CHARACTERS} characters long, not {len(text)}")
        check_text(text, fields.path(name))
    return tuple(dict.fromkeys(str(text) for text in texts))


def _min_tokens(fields: Fields, max_tokens: int | None, param: str) -> int:
    least = fields.integer("min_tokens", 0, MAX_TOKENS_BOUND) or 0
    if max_tokens is not None and least > max_tokens:
        fields.refuse("min_tokens", f"is {least}, and {param} is {max_tokens}")
    return least


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """As OpenAI writes it: token ids as names, what is added to their logits as values."""
    section = fields.section("logit_bias")
    if section is None:
        return ()
    names = section.names()
    if len(names) > MAX_BIASED_TOKENS:
        fields.refuse("logit_bias", f"must hold at most {MAX_BIASED_TOKENS} tokens, not {len(names)}")
    bias: dict[int, float] = {}
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) <= MAX_TOKEN_ID_DIGITS):
            fields.refuse("logit_bias", f"its names must be token ids, and {shown(name)} is none")
        value = section.number(name, -MAX_BIAS, MAX_BIAS)
        if value is not None:
            bias[int(name)] = value
    return tuple(sorted(bias.items()))


def _service_tier(fields: Fields) -> ServiceTier | None:
    value = fields.text("service_tier")
    for tier in TIERS:
        if value == tier:
            return tier
    if value is not None:
        fields.refuse("service_tier", f"must be one of {', '.join(TIERS)}, not {shown(value)}")
    return None


def _usage(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Whether the counts come at the end, and whether with each chunk too."""
    options = fields.section("stream_options")
    if options is None:
        return False, False
    if not stream:
        fields.refuse("stream_options", "is allowed only when stream is true")
    include = options.flag("include_usage")
    continuous = options.flag("continuous_usage_stats")
    if continuous and not include:
        options.refuse("continuous_usage_stats", "is allowed only when include_usage is true")
    options.accept_inert({"include_obfuscation": Inert(bool, lambda value: value is False)})
    options.end()
    return include, continuous
