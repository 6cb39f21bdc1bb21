"""What a client is told that asks for a route which is not here: a plain "not found" looks like a wrong address.

Pure. Must not know the routes that are here.
"""

from __future__ import annotations

from collections.abc import Iterable

from sluice_sidecar.errors import Reason, Refusal, shown

# Routes of OpenAI's and of other servers, as far as their clients ask for them by themselves; and what they are for.
_PURPOSES = {
    "/v1/embeddings": "embeddings",
    "/v1/moderations": "moderation",
    "/v1/responses": "OpenAI's Responses API",
    "/v1/messages": "Anthropic's Messages API",
    "/v1/conversations": "OpenAI's stored conversations",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/files": "uploaded files",
    "/v1/uploads": "uploaded files",
    "/v1/vector_stores": "vector stores",
    "/v1/batches": "batches of files",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/evals": "evaluations",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/audio": "speech",
    "/v1/realtime": "speech",
    "/v1/rerank": "ranking",
    "/rerank": "ranking",
    "/v1/score": "ranking",
    "/score": "ranking",
    "/pooling": "embeddings",
}


def unknown_route(path: str, known: Iterable[str]) -> Refusal:
    """The refusal of a path that is none of the known ones."""
    purpose = next(
        (purpose for route, purpose in _PURPOSES.items() if path == route or path.startswith(f"{route}/")), ""
    )
    why = f": {purpose} is not what a server of one text model does" if purpose else ""
    return Refusal(Reason.NOT_FOUND, f"There is no {shown(path)}{why}; this server has {', '.join(known)}.")
