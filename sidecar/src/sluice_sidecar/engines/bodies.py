"""A body's `priority` in the words of another engine.

Pure. Bytes are kept as they came wherever they can be: a body is parsed only when the word is in it.
"""

from __future__ import annotations

import json

from sluice_engine.core.terms import Terms

_WORD = b'"priority"'


def with_priority(content: bytes, terms: Terms, sign: int) -> bytes:
    """The body with the priority of its class; what it asks for itself orders it within that, as for our own engine.

    `sign`: +1 where small numbers go first, −1 where large ones do.
    """
    asked: object = None
    if _WORD in content:
        data = json.loads(content)
        asked = data.pop("priority", None)
        if not isinstance(asked, int) and asked is not None:
            return content  # the engine says best what is wrong with it
        content = json.dumps(data).encode()
    behind = isinstance(asked, int) and asked > 0
    # At the end: of two fields of one name the last counts, and a client may have written the name with escapes.
    fields = content.rstrip()[:-1]
    comma = b"" if fields.strip() == b"{" else b", "
    return b"%s%s%s: %d}" % (fields, comma, _WORD, sign * terms.priority(behind=behind))


def without_priority(content: bytes) -> bytes:
    """The body without a field that the engine would refuse, or read the other way round."""
    if _WORD not in content:
        return content
    data = json.loads(content)
    if "priority" not in data:
        return content
    del data["priority"]
    return json.dumps(data).encode()
