"""One call by the `openai` client that is first on the path, as a program of its own: its outcome as JSON."""

from __future__ import annotations

import json
import sys

import openai


def main() -> None:
    url, max_retries = sys.argv[1], int(sys.argv[2])
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=max_retries)
    found: dict[str, object] = {"version": openai.__version__, "text": None, "error": None, "status": None}
    try:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=16
        )
        found["text"] = answer.choices[0].message.content
    except openai.APIStatusError as error:
        found["error"], found["status"] = error.code, error.status_code
    print(json.dumps(found))


if __name__ == "__main__":
    main()
