"""`/openapi.json`: the whole API as an OpenAPI 3.1 document, made of the very bounds that the parsers go by.

What no schema can say (fields that exclude each other, token ids that the model has) is left to the answer, a 400 that
names the field. Start reading at `document`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice_engine.protocol.chat import MAX_TOP_LOGPROBS as MAX_CHAT_LOGPROBS
from sluice_engine.protocol.completions import MAX_PROMPTS, MAX_TOP_LOGPROBS
from sluice_engine.protocol.generation import (
    LEAST_REPETITION_PENALTY,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_N,
    MAX_PRIORITY,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOKEN_ID_DIGITS,
    MAX_TOKENS_BOUND,
    TIERS,
)
from sluice_engine.protocol.messages import MAX_CALL_ID_CHARACTERS, ROLES
from sluice_engine.protocol.structure import MAX_CHOICES_OF_TEXT, MAX_SOURCE_BYTES
from sluice_engine.protocol.tokens import MAX_TOKENS
from sluice_engine.protocol.tools import CHOICES, MAX_TOOLS, NAME_PATTERN

Schema = dict[str, Any]

_FUNCTION_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def document(served_name: str, version: str) -> Schema:
    """The document of an engine that serves one model."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sluice",
            "version": version,
            "description": "OpenAI's chat and text completions for one model, behind a gate that keeps a promise.",
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _post(
                "chat", "Go on with a conversation.", "ChatRequest", "ChatCompletion", streams=True
            ),
            "/v1/completions": _post("complete", "Go on with a text.", "CompletionRequest", "Completion", streams=True),
            "/tokenize": _post("tokenize", "The token ids of a text or a conversation.", "TokenizeRequest", "Tokens"),
            "/detokenize": _post("detokenize", "The text of token ids.", "DetokenizeRequest", "Text"),
            "/v1/models": _get("models", "The one model.", "Models"),
            "/v1/models/{model}": _get("model", "The one model, by its name.", "Model", parameter=served_name),
        },
        "components": {
            "schemas": {**_requests(served_name), **_replies()},
            "responses": {"Refusal": _answer("A refusal: what is wrong, and with which field.", "Error")},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Where the service asks for keys."}
            },
        },
    }


# Operations.


def _post(name: str, summary: str, request: str, reply: str, *, streams: bool = False) -> Schema:
    answer = _answer("The answer.", reply)
    if streams:
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    return {"post": {"operationId": name, "summary": summary, "requestBody": body, "responses": _responses(answer)}}


def _get(name: str, summary: str, reply: str, *, parameter: str | None = None) -> Schema:
    operation: Schema = {"operationId": name, "summary": summary, "responses": _responses(_answer("It.", reply))}
    if parameter is not None:
        schema = {"type": "string", "minLength": 1, "example": parameter}
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    return {"get": operation}


def _responses(answer: Schema) -> Schema:
    refusal = {"$ref": "#/components/responses/Refusal"}
    return {"200": answer, "4XX": refusal, "5XX": refusal}


def _answer(description: str, reply: str) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": _ref(reply)}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# Requests.


def _requests(served_name: str) -> Schema:
    model = {"type": "string", "enum": [served_name]}
    shared = _generation()
    messages = {"type": "array", "minItems": 1, "items": _ref("Message")}
    tokenized = _optional({"model": model, "add_special_tokens": {"type": "boolean"}})
    return {
        "Message": _message(),
        "ChatRequest": _object(
            {
                "model": model,
                "messages": messages,
                **_optional(
                    {
                        **shared,
                        "logprobs": {"type": "boolean"},
                        "top_logprobs": _integer(0, MAX_CHAT_LOGPROBS),
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
        "CompletionRequest": _object(
            {
                "model": model,
                "prompt": _prompts(),
                **_optional(
                    {
                        **shared,
                        "logprobs": _integer(0, MAX_TOP_LOGPROBS),
                        "echo": {"type": "boolean"},
                        "best_of": _integer(1, 20),
                    }
                ),
            },
            required=("model", "prompt"),
        ),
        "TokenizeRequest": {
            "anyOf": [
                _object({**tokenized, "prompt": {"type": "string"}, "messages": {"type": "null"}}, ("prompt",)),
                _object(
                    {**tokenized, **_optional(_tools()), "prompt": {"type": "null"}, "messages": messages},
                    ("messages",),
                ),
            ]
        },
        "DetokenizeRequest": _object(
            {**_optional({"model": model}), "tokens": {**_TOKEN_IDS, "maxItems": MAX_TOKENS}}, required=("tokens",)
        ),
    }


def _message() -> Schema:
    part = _object({"type": {"const": "text"}, "text": {"type": "string"}}, required=("type", "text"))
    content = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": part}]}
    others = _optional({"name": {"type": "string"}, "annotations": {"type": "array"}})
    call_id = {"type": "string", "minLength": 1, "maxLength": MAX_CALL_ID_CHARACTERS}
    call = _object(
        {
            "id": call_id,
            "type": {"const": "function"},
            "function": _object({"name": _FUNCTION_NAME, "arguments": {"type": "string"}}, ("name", "arguments")),
        },
        required=("id", "type", "function"),
    )
    calls = {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": call}
    said = {"role": {"enum": [role for role in ROLES if role != "tool"]}, "content": content, **others}
    called = {"role": {"const": "assistant"}, **_optional({"content": content}), "tool_calls": calls, **others}
    answered = {"role": {"const": "tool"}, "content": content, "tool_call_id": call_id, **others}
    return {
        "anyOf": [
            _object(said, required=("role", "content")),
            _object(called, required=("role", "tool_calls")),
            _object(answered, required=("role", "content", "tool_call_id")),
        ]
    }


def _tools() -> Schema:
    parameters = {"type": "object", "properties": {"type": {"const": "object"}}}
    function = _object(
        {
            "name": _FUNCTION_NAME,
            **_optional({"description": {"type": "string"}, "parameters": parameters, "strict": {"type": "boolean"}}),
        },
        required=("name",),
    )
    tool = _object({"type": {"const": "function"}, "function": function}, required=("type", "function"))
    named = _object(
        {"type": {"const": "function"}, "function": _object({"name": _FUNCTION_NAME}, required=("name",))},
        required=("type", "function"),
    )
    return {
        "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": tool},
        "tool_choice": {"anyOf": [{"type": "string", "enum": list(CHOICES)}, named]},
        "parallel_tool_calls": {"type": "boolean"},
    }


def _prompts() -> Schema:
    text = {"type": "string", "minLength": 1}
    token_ids = {**_TOKEN_IDS, "minItems": 1}
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
        "max_tokens": _integer(1, MAX_TOKENS_BOUND),
        "max_completion_tokens": _integer(1, MAX_TOKENS_BOUND),
        "min_tokens": _integer(0, MAX_TOKENS_BOUND),
        "temperature": _number(0, 2),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1, MAX_TOKENS_BOUND),
        "min_p": _number(0, 1),
        "frequency_penalty": _number(-2, 2),
        "presence_penalty": _number(-2, 2),
        "repetition_penalty": _number(LEAST_REPETITION_PENALTY, 10),
        "seed": _integer(-(2**63), 2**63 - 1),
        "n": _integer(1, MAX_N),
        "stop": {"anyOf": [stop, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": stop}]},
        "stop_token_ids": {**_TOKEN_IDS, "maxItems": MAX_STOP_TOKENS},
        "ignore_eos": {"type": "boolean"},
        "logit_bias": {
            "type": "object",
            "maxProperties": MAX_BIASED_TOKENS,
            "propertyNames": {"pattern": f"^[0-9]{{1,{MAX_TOKEN_ID_DIGITS}}}$"},
            "additionalProperties": bias,
        },
        "priority": _integer(-MAX_PRIORITY, MAX_PRIORITY),
        "service_tier": {"type": "string", "enum": list(TIERS)},
        "response_format": _response_format(structures["json"]),
        "structured_outputs": {
            **_object(_optional({**structures, "json_object": {"type": "boolean"}})),
            "minProperties": 1,
        },
        **{f"guided_{name}": schema for name, schema in structures.items()},
        "stream": {"type": "boolean"},
        "stream_options": _object(
            _optional(
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
    named = _object(
        {
            "name": {"type": "string"},
            **_optional({"description": {"type": "string"}, "strict": {"type": "boolean"}, "schema": schema}),
        },
        required=("name",),
    )
    plain = _object({"type": {"enum": ["text", "json_object"]}}, required=("type",))
    by_schema = _object({"type": {"const": "json_schema"}, "json_schema": named}, required=("type", "json_schema"))
    return {"anyOf": [plain, by_schema]}


# Replies.


def _replies() -> Schema:
    count: Schema = {"type": "integer", "minimum": 0}
    logprobs = {"type": ["object", "null"]}
    reason = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
    call = _open(
        {
            "id": {"type": "string"},
            "type": {"const": "function"},
            "function": _open({"name": _FUNCTION_NAME, "arguments": {"type": "string"}}),
        }
    )
    message = _open(
        {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}, "refusal": {"type": "null"}}
    )
    message["properties"]["tool_calls"] = {"type": "array", "minItems": 1, "items": call}
    usage = _open(
        {
            "prompt_tokens": count,
            "completion_tokens": count,
            "total_tokens": count,
            "prompt_tokens_details": _open({"cached_tokens": count}),
        }
    )
    head: dict[str, Schema] = {"id": {"type": "string"}, "created": {"type": "integer"}, "model": {"type": "string"}}
    ends: dict[str, Schema] = {"index": count, "logprobs": logprobs, "finish_reason": reason}
    error: dict[str, Schema] = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    return {
        "ChatCompletion": _open(
            {
                **head,
                "object": {"const": "chat.completion"},
                "choices": {"type": "array", "minItems": 1, "items": _open({**ends, "message": message})},
                "usage": usage,
            }
        ),
        "Completion": _open(
            {
                **head,
                "object": {"const": "text_completion"},
                "choices": {"type": "array", "minItems": 1, "items": _open({**ends, "text": {"type": "string"}})},
                "usage": usage,
            }
        ),
        "Tokens": _open({"count": count, "max_model_len": count, "tokens": _TOKEN_IDS}),
        "Text": _open({"prompt": {"type": "string"}}),
        "Model": _open({"id": {"type": "string"}, "object": {"const": "model"}, "owned_by": {"type": "string"}}),
        "Models": _open({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}),
        "Error": _open({"error": _open(error)}),
    }


# Schemas.


def _object(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """An object of these fields and no others, as the parsers read it."""
    schema: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return schema | ({"required": list(required)} if required else {})


def _open(properties: Mapping[str, Schema]) -> Schema:
    """An object of a reply: these fields are always there, and others may come one day."""
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _optional(properties: Mapping[str, Schema]) -> Schema:
    """Fields that may be left out, which null says as well."""
    return {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in properties.items()}


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}
