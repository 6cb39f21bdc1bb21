"""Alertmanager beside a test, and the webhook that stands for the person whom it wakes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from charts.prometheus import listening


class Webhook:
    """Every alert that was delivered, in order."""

    def __init__(self) -> None:
        self._delivered: list[dict[str, Any]] = []

    def take(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Alertmanager delivers."""
        self._delivered += alerts

    def delivered(self, name: str, status: str) -> list[dict[str, Any]]:
        """Alerts of that name that came as `firing` or `resolved`."""
        return [one for one in self._delivered if (one["labels"]["alertname"], one["status"]) == (name, status)]


@contextmanager
def webhook() -> Iterator[tuple[Webhook, str]]:
    """A webhook and its URL."""
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            hook.take(json.loads(body)["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hook, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def alertmanager(programs: Path, folder: Path, receiver: str) -> Iterator[str]:
    """Alertmanager that sends everything to one webhook at once; where it listens."""
    config = {
        "route": {
            "receiver": "hook",
            "group_by": ["alertname", "namespace", "inferenceservice"],
            "group_wait": "1s",
            "group_interval": "1s",
        },
        "receivers": [{"name": "hook", "webhook_configs": [{"url": receiver, "send_resolved": True}]}],
    }
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(config))
    # Debian's build reads its templates under /usr/share: laid over it for this process alone.
    over = f'mount -t overlay overlay -o "lowerdir={programs}/share:/usr/share" /usr/share && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", over, "sh", programs / "prometheus-alertmanager"]
    options = ["--config.file=alertmanager.yaml", "--storage.path=alerts", "--cluster.listen-address="]
    with listening(folder, "alertmanager", [*words, *options, "--web.listen-address=127.0.0.1:0"]) as url:
        yield url.removeprefix("http://")
