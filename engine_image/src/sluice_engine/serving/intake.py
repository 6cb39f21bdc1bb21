"""From a typed call to requests for the engine: chat template, token ids, lengths that fit, seeds. No I/O.

Everything that can be refused is refused here, before the engine hears of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sluice_engine.bodies import shown
from sluice_engine.core.fit import largest_output_tokens, unfit_reason
from sluice_engine.core.request import Request
from sluice_engine.core.terms import FLEX, Terms
from sluice_engine.errors import InvalidRequest
from sluice_engine.protocol.body import UNSUPPORTED
from sluice_engine.protocol.chat import ChatCall
from sluice_engine.protocol.completions import CompletionCall
from sluice_engine.protocol.generation import Generation
from sluice_engine.protocol.structure import Structure
from sluice_engine.protocol.tools import ToolUse
from sluice_engine.serving.chat_prompt import Prompt, chat_prompt, tool_template
from sluice_engine.serving.publication import LoadedEngine
from sluice_engine.text.tokenizer import Tokenizer
from sluice_engine.text.tool_calls import ToolCalling
from sluice_engine.text.tool_format import ToolFormat, ToolTemplate
from sluice_engine.text.tool_grammar import tool_grammar


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat call as the model takes it."""

    prompt: Prompt
    generation: Generation
    """The call's options, with the grammar that its tools may want."""
    calling: ToolCalling | None
    """How its tools are called; None where none may be."""


def prepared_chat(call: ChatCall, tokenizer: Tokenizer) -> PreparedChat:
    """What the model's own chat template makes of a call.

    Raises:
        InvalidRequest: as `chat_prompt`, or an answer by a grammar cannot be what is asked.
    """
    use = call.tool_use
    prompt = chat_prompt(call.messages, () if use is None else use.tools, tokenizer)
    if use is None:
        return PreparedChat(prompt, call.generation, None)
    tools = tool_template(tokenizer, "tools")
    structure = _tool_structure(call.generation, use, tools)
    return PreparedChat(prompt, replace(call.generation, structure=structure), ToolCalling.of(tools, use))


def _tool_structure(generation: Generation, use: ToolUse, tools: ToolTemplate) -> Structure | None:
    """The grammar of an answer that may call tools; None where the model is free."""
    answer = generation.structure
    if answer is not None and not use.required:
        _check_answer(answer, tools.form)
    try:
        structure = tool_grammar(tools.form, tools.special, use, answer)
    except RecursionError as error:
        raise InvalidRequest.field("tools", "are nested too deep") from error
    if structure is not None and generation.ignore_eos:
        problem = "is not allowed where a call must follow a schema: its end is the answer's end"
        raise InvalidRequest.field("ignore_eos", problem)
    return structure


def _check_answer(answer: Structure, form: ToolFormat) -> None:
    if form.bare:
        problem = "is not supported beside tools with this model: its calls are JSON without a mark, as that would be"
        raise InvalidRequest.field(answer.param, problem, code=UNSUPPORTED)
    try:
        json.loads(answer.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.field(answer.param, "is not JSON", code="invalid_grammar") from error


def completion_prompts(call: CompletionCall, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a completion call."""
    return [
        Prompt(tokenizer.encode(prompt, add_special=True), param, prompt, call.echo)
        if isinstance(prompt, str)
        else Prompt(list(prompt), param, None, call.echo)
        for prompt, param in zip(call.prompts, call.prompt_params, strict=True)
    ]


def requests_of(
    prompts: Sequence[Prompt],
    generation: Generation,
    engine: LoadedEngine,
    *,
    request_id: str,
    terms: Terms,
    arrival_us: int,
    draw_seed: Callable[[], int],
    adapter: str = "",
) -> list[Request]:
    """One request for each choice of each prompt, in the order of the reply's indices.

    Raises:
        InvalidRequest: a prompt is empty, holds ids the model does not know, or cannot ever fit.
    """
    check_token_ids("stop_token_ids", generation.stop_token_ids, engine.vocab_size)
    check_token_ids("logit_bias", (token_id for token_id, _ in generation.logit_bias), engine.vocab_size)
    # What ends a turn of a model that has no such token is never sampled.
    eos_ids = frozenset(token_id for token_id in engine.tokenizer.eos_ids if token_id < engine.vocab_size)
    if generation.structure is not None and not eos_ids:
        problem = "needs a token with which the model ends its answers, and this model has none"
        raise InvalidRequest.field(generation.structure.param, problem, code=UNSUPPORTED)
    if generation.service_tier == FLEX:
        terms = terms.flexible()
    seed = generation.seed if generation.seed is not None else draw_seed()
    requests: list[Request] = []
    # Most answers are shorter than the gate expects: an order goes by that, but no deadline is given up for it.
    expected = terms.expected_output_tokens if terms.finish_us is None else None
    for prompt in prompts:
        max_tokens = _max_tokens(prompt, generation, engine)
        leader: Request | None = None
        for choice in range(generation.n):
            sampling = generation.sampling(max_tokens=max_tokens, seed=seed, choice=choice, eos_ids=eos_ids)
            requests.append(
                Request(
                    id=f"{request_id}/{len(requests)}",
                    tokens=list(prompt.tokens),
                    num_prompt=len(prompt.tokens),
                    sampling=sampling,
                    arrival_us=arrival_us,
                    gate_id=request_id,
                    index=len(requests),
                    priority=terms.priority(behind=generation.behind),
                    tenant=terms.tenant,
                    first_token_deadline_us=_deadline(arrival_us, terms.first_token_us),
                    finish_deadline_us=_deadline(arrival_us, terms.finish_us),
                    expected_output_tokens=None if expected is None else min(expected, max_tokens),
                    leader=leader,
                    adapter=adapter,
                )
            )
            leader = leader or requests[-1]
    return requests


def _deadline(arrival_us: int, bound_us: int | None) -> int | None:
    return None if bound_us is None else arrival_us + bound_us


def _max_tokens(prompt: Prompt, generation: Generation, engine: LoadedEngine) -> int:
    num_prompt = len(prompt.tokens)
    if not prompt.tokens:
        raise InvalidRequest.field(prompt.param, "holds no tokens")
    check_token_ids(prompt.param, prompt.tokens, engine.vocab_size)
    most = largest_output_tokens(num_prompt, max_length_tokens=engine.max_length_tokens, pool_tokens=engine.pool_tokens)
    max_tokens = most if generation.max_tokens is None else generation.max_tokens
    problem = unfit_reason(
        num_prompt, max(1, max_tokens), max_length_tokens=engine.max_length_tokens, pool_tokens=engine.pool_tokens
    )
    if problem is not None:
        # Where not even one token fits beside the prompt, the prompt is what must be shortened.
        param = prompt.param if most < 1 else generation.max_tokens_param
        raise InvalidRequest.field(param, problem, code="context_length_exceeded")
    if generation.min_tokens > max_tokens:
        problem = f"is {generation.min_tokens}, and beside the prompt ({num_prompt} tokens) {max_tokens} fit"
        raise InvalidRequest.field("min_tokens", problem)
    return max_tokens


def check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the model does not have.

    Raises:
        InvalidRequest: names the first of them.
    """
    unknown = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if unknown is not None:
        limit = f"{shown(unknown)} is not a token id; the model has 0 to {vocab_size - 1}"
        raise InvalidRequest.field(param, limit)
