"""What schemathesis is told beside the document: answers of a few tokens say as much as long ones.

Loaded by the program itself (`SCHEMATHESIS_HOOKS`), not by pytest.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MOST_TOKENS = 3


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    if isinstance(body, dict) and ("prompt" in body or "messages" in body) and "model" in body:
        body.pop("max_completion_tokens", None)
        body.pop("min_tokens", None)
        if isinstance(body.get("max_tokens", 0), int | None):
            body["max_tokens"] = MOST_TOKENS
        if isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 2)
    return body
