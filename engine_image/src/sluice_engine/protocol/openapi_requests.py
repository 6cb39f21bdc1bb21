"""The bodies that the API takes, as JSON schemas, by the very bounds that the parsers go by."""

from __future__ import annotations

from sluice_engine.bodies import MAX_PIECES
from sluice_engine.protocol.chat import MAX_TOP_LOGPROBS as MAX_CHAT_LOGPROBS
from sluice_engine.protocol.completions import MAX_BEST_OF, MAX_PROMPTS, MAX_TOP_LOGPROBS
from sluice_engine.protocol.generation import (
    LEAST_REPETITION_PENALTY,
    LEAST_SEED,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_N,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID_DIGITS,
    MAX_TOKENS_BOUND,
    TIERS,
)
from sluice_engine.protocol.messages import MAX_CALL_ID_CHARACTERS, ROLES
from sluice_engine.protocol.schemas import (
    FUNCTION_NAME,
    TOKEN_IDS,
    Schema,
    an_object,
    integer,
    number,
    optional,
    reference,
)
from sluice_engine.protocol.structure import MAX_CHOICES_OF_TEXT, MAX_SOURCE_BYTES
from sluice_engine.protocol.tokens import MAX_TOKENS
from sluice_engine.protocol.tools import CHOICES, MAX_TOOLS


def request_schemas(served_name: str) -> Schema:
    """By their names."""
    model = {"type": "string", "enum": [served_name]}
    shared = _generation()
    messages = {"type": "array", "minItems": 1, "maxItems": MAX_PIECES, "items": reference("Message")}
    tokenized = optional({"model": model, "add_special_tokens": {"type": "boolean"}})
    return {
        "Message": _message(),
        "ChatRequest": an_object(
            {
                "model": model,
                "messages": messages,
                **optional(
                    {
                        **shared,
                        "logprobs": {"type": "boolean"},
                        "top_logprobs": integer(0, MAX_CHAT_LOGPROBS),
                        "safety_identifier": {"type": "string"},
                        "prompt_cache_key": {"type": "string"},
                        "prompt_cache_retention": {"type": "string"},
                        **_tools(),
                        "functions": {"type": "array", "maxItems": 0},
                        "function_call": {"type": "string", "enum": ["none", "auto"]},
                        "modalities": {"type": "array", "const": ["text"]},
                    }
                ),
            },
            required=("model", "messages"),
        ),
        "CompletionRequest": an_object(
            {
                "model": model,
                "prompt": _prompts(),
                **optional(
                    {
                        **shared,
                        "logprobs": integer(0, MAX_TOP_LOGPROBS),
                        "echo": {"type": "boolean"},
                        "best_of": integer(1, MAX_BEST_OF),
                    }
                ),
            },
            required=("model", "prompt"),
        ),
        "TokenizeRequest": {
            "anyOf": [
                an_object({**tokenized, "prompt": {"type": "string"}, "messages": {"type": "null"}}, ("prompt",)),
                an_object(
                    {**tokenized, **optional(_tools()), "prompt": {"type": "null"}, "messages": messages},
                    ("messages",),
                ),
            ]
        },
        "DetokenizeRequest": an_object(
            {**optional({"model": model}), "tokens": {**TOKEN_IDS, "maxItems": MAX_TOKENS}}, required=("tokens",)
        ),
    }


def _message() -> Schema:
    part = an_object({"type": {"const": "text"}, "text": {"type": "string"}}, required=("type", "text"))
    content = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "maxItems": MAX_PIECES, "items": part}]}
    others = optional({"name": {"type": "string"}, "annotations": {"type": "array"}})
    call_id = {"type": "string", "minLength": 1, "maxLength": MAX_CALL_ID_CHARACTERS}
    call = an_object(
        {
            "id": call_id,
            "type": {"const": "function"},
            "function": an_object({"name": FUNCTION_NAME, "arguments": {"type": "string"}}, ("name", "arguments")),
        },
        required=("id", "type", "function"),
    )
    calls = {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": call}
    said = {"role": {"enum": [role for role in ROLES if role != "tool"]}, "content": content, **others}
    called = {"role": {"const": "assistant"}, **optional({"content": content}), "tool_calls": calls, **others}
    answered = {"role": {"const": "tool"}, "content": content, "tool_call_id": call_id, **others}
    return {
        "anyOf": [
            an_object(said, required=("role", "content")),
            an_object(called, required=("role", "tool_calls")),
            an_object(answered, required=("role", "content", "tool_call_id")),
        ]
    }


def _tools() -> Schema:
    parameters = {"type": "object", "properties": {"type": {"const": "object"}}}
    function = an_object(
        {
            "name": FUNCTION_NAME,
            **optional({"description": {"type": "string"}, "parameters": parameters, "strict": {"type": "boolean"}}),
        },
        required=("name",),
    )
    tool = an_object({"type": {"const": "function"}, "function": function}, required=("type", "function"))
    named = an_object(
        {"type": {"const": "function"}, "function": an_object({"name": FUNCTION_NAME}, required=("name",))},
        required=("type", "function"),
    )
    return {
        "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": tool},
        "tool_choice": {"anyOf": [{"type": "string", "enum": list(CHOICES)}, named]},
        "parallel_tool_calls": {"type": "boolean"},
    }


def _prompts() -> Schema:
    text = {"type": "string", "minLength": 1}
    token_ids = {**TOKEN_IDS, "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [text, token_ids]}}
    return {"anyOf": [text, token_ids, several]}


def _generation() -> Schema:
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    bias = {"type": ["number", "null"], "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    source = {"type": "string", "minLength": 1, "maxLength": MAX_SOURCE_BYTES}
    structures: dict[str, Schema] = {
        "json": {"anyOf": [{"type": "object"}, source]},
        "regex": source,
        "choice": {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES_OF_TEXT, "items": source},
        "grammar": source,
    }
    return {
        "max_tokens": integer(1, MAX_TOKENS_BOUND),
        "max_completion_tokens": integer(1, MAX_TOKENS_BOUND),
        "min_tokens": integer(0, MAX_TOKENS_BOUND),
        "temperature": number(0, MAX_TEMPERATURE),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": integer(-1, MAX_TOKENS_BOUND),
        "min_p": number(0, 1),
        "frequency_penalty": number(-MAX_PENALTY, MAX_PENALTY),
        "presence_penalty": number(-MAX_PENALTY, MAX_PENALTY),
        "repetition_penalty": number(LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "seed": integer(LEAST_SEED, MAX_SEED),
        "n": integer(1, MAX_N),
        "stop": {"anyOf": [stop, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": stop}]},
        "stop_token_ids": {**TOKEN_IDS, "maxItems": MAX_STOP_TOKENS},
        "ignore_eos": {"type": "boolean"},
        "logit_bias": {
            "type": "object",
            "maxProperties": MAX_BIASED_TOKENS,
            "propertyNames": {"pattern": f"^[0-9]{{1,{MAX_TOKEN_ID_DIGITS}}}$"},
            "additionalProperties": bias,
        },
        "priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
        "service_tier": {"type": "string", "enum": list(TIERS)},
        "response_format": _response_format(structures["json"]),
        "structured_outputs": {
            **an_object(optional({**structures, "json_object": {"type": "boolean"}})),
            "minProperties": 1,
        },
        **{f"guided_{name}": schema for name, schema in structures.items()},
        "stream": {"type": "boolean"},
        "stream_options": an_object(
            optional(
                {
                    "include_usage": {"type": "boolean"},
                    "continuous_usage_stats": {"type": "boolean"},
                    "include_obfuscation": {"const": False},
                }
            )
        ),
        "user": {"type": "string"},
        "metadata": {"type": "object"},
        "store": {"const": False},
    }


def _response_format(schema: Schema) -> Schema:
    named = an_object(
        {
            "name": {"type": "string"},
            **optional({"description": {"type": "string"}, "strict": {"type": "boolean"}, "schema": schema}),
        },
        required=("name",),
    )
    plain = an_object({"type": {"enum": ["text", "json_object"]}}, required=("type",))
    by_schema = an_object({"type": {"const": "json_schema"}, "json_schema": named}, required=("type", "json_schema"))
    return {"anyOf": [plain, by_schema]}
