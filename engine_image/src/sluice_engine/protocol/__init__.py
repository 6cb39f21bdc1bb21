"""OpenAI's wire format: a JSON body to a typed call, tokens and ends to JSON or SSE frames. No I/O.

Reading order: `body` (fields, strictly), `generation` (what both endpoints share), `chat` and `completions` (one call
and its reply each), `reply` (what a reply is made of). Every field that OpenAI defines is obeyed, accepted because it
changes nothing here, or refused by name; any other field is unknown and refused too.
"""
