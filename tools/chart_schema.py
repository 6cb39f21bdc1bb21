"""The chart's values.schema.json with a description of every value: the comments of values.yaml, for editors.

Owns nothing but those descriptions; types and bounds stay as they are written in the schema by hand.
"""

from __future__ import annotations

import json
from typing import Any

from chart_page import documented_values
from page import flat

Schema = dict[str, Any]


def described(schema: Schema, values: str) -> str:
    """The schema as text, each value with its comment as `description`."""
    made: Schema = json.loads(json.dumps(schema))
    for path, _, meaning in documented_values(values):
        node: Schema | None = made
        for name in path.split("."):
            assert node is not None
            node = node.get("properties", {}).get(name) if "$ref" not in node else None
            if node is None:  # what a definition holds is described there, once
                break
        if node is not None:
            rest = {key: value for key, value in node.items() if key != "description"}
            node.clear()
            node |= {"description": flat(meaning).replace("`", ""), **rest}
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"
