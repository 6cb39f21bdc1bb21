"""`/openapi.json`: the whole API as an OpenAPI 3.1 document, made of the very bounds that the parsers go by.

What no schema can say (fields that exclude each other, token ids that the model has) is left to the answer, a 400 that
names the field. Start reading at `document`.
"""

from __future__ import annotations

from sluice_engine.protocol.openapi_requests import request_schemas
from sluice_engine.protocol.schemas import FUNCTION_NAME, TOKEN_IDS, Schema, a_reply, reference


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
            "schemas": {**request_schemas(served_name), **_reply_schemas()},
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
    body = {"required": True, "content": {"application/json": {"schema": reference(request)}}}
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
    return {"description": description, "content": {"application/json": {"schema": reference(reply)}}}


# Replies.


def _reply_schemas() -> Schema:
    count: Schema = {"type": "integer", "minimum": 0}
    logprobs = {"type": ["object", "null"]}
    reason = {"type": "string", "enum": ["stop", "length", "tool_calls"]}
    call = a_reply(
        {
            "id": {"type": "string"},
            "type": {"const": "function"},
            "function": a_reply({"name": FUNCTION_NAME, "arguments": {"type": "string"}}),
        }
    )
    message = a_reply(
        {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}, "refusal": {"type": "null"}}
    )
    message["properties"]["tool_calls"] = {"type": "array", "minItems": 1, "items": call}
    usage = a_reply(
        {
            "prompt_tokens": count,
            "completion_tokens": count,
            "total_tokens": count,
            "prompt_tokens_details": a_reply({"cached_tokens": count}),
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
        "ChatCompletion": a_reply(
            {
                **head,
                "object": {"const": "chat.completion"},
                "choices": {"type": "array", "minItems": 1, "items": a_reply({**ends, "message": message})},
                "usage": usage,
            }
        ),
        "Completion": a_reply(
            {
                **head,
                "object": {"const": "text_completion"},
                "choices": {"type": "array", "minItems": 1, "items": a_reply({**ends, "text": {"type": "string"}})},
                "usage": usage,
            }
        ),
        "Tokens": a_reply({"count": count, "max_model_len": count, "tokens": TOKEN_IDS}),
        "Text": a_reply({"prompt": {"type": "string"}}),
        "Model": a_reply({"id": {"type": "string"}, "object": {"const": "model"}, "owned_by": {"type": "string"}}),
        "Models": a_reply({"object": {"const": "list"}, "data": {"type": "array", "items": reference("Model")}}),
        "Error": a_reply({"error": a_reply(error)}),
    }
