"""The cluster as the user's own kubectl reaches it: objects, logs, a command in a container, a forwarded port.

Owns the calls of kubectl. kubectl and not a client library: a plugin has it at hand, it signs in as the user does (exec
plugins, proxies, contexts), and it needs only the rights that the user has. Ports are forwarded, since a forward ends
inside the pod: no NetworkPolicy is in its way, and no right on `pods/proxy` is needed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

from sluice_operator.errors import InvalidSettings, Unreachable

Object = dict[str, Any]

SERVICES = "inferenceservices.sluice.dev"
ADMIN_PORT = 9090

_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")
# kubectl gives up on a server that does not answer after this long; a read of ours is never longer.
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """kubectl with what the user said about where."""

    namespace: str = ""
    """Empty: that of the user's context."""
    context: str = ""
    kubeconfig: str = ""

    def get(self, kind: str, name: str) -> Object:
        """One object.

        Raises:
            InvalidSettings: there is none, or the user may not read it; in kubectl's words.
            Unreachable: the API server does not answer.
        """
        found: Object = json.loads(self.read("get", kind, name, "-o", "json"))
        return found

    def list(self, kind: str, *words: str) -> list[Object]:
        """The objects of a kind; `words` select among them.

        Raises:
            InvalidSettings, Unreachable: as for `get`.
        """
        items: list[Object] = json.loads(self.read("get", kind, *words, "-o", "json"))["items"]
        return items

    def read(self, *words: str, timeout_s: float = _TIMEOUT_S) -> str:
        """What kubectl prints.

        Raises:
            InvalidSettings, Unreachable: as for `get`.
        """
        try:
            done = subprocess.run(  # noqa: S603  # the user's own kubectl, no shell
                self.command(*words), capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"kubectl {words[0]} has no answer after {timeout_s:g} s") from error
        if done.returncode:
            raise _failed(done.stderr or done.stdout)
        return done.stdout

    @contextlib.contextmanager
    def forwarded(self, pod: str, port: int = ADMIN_PORT) -> Iterator[str]:
        """The URL of a pod's port on this machine, for as long as the block runs.

        Raises:
            InvalidSettings, Unreachable: as for `get`.
        """
        words = self.command("port-forward", f"pod/{pod}", f":{port}", "--address=127.0.0.1")
        with (
            tempfile.TemporaryFile("w+") as complaints,
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=complaints, text=True) as process,  # noqa: S603  # as above
        ):
            assert process.stdout is not None
            # It writes a line for each connection, and would stand still once the pipe is full.
            reader = Thread(target=deque, args=(process.stdout, 0), daemon=True)
            try:
                match = _FORWARDED.search(process.stdout.readline())
                if match is None:
                    process.terminate()
                    process.wait()
                    complaints.seek(0)
                    raise _failed(complaints.read() or f"pod {pod}: the port {port} cannot be forwarded")
                reader.start()
                yield f"http://127.0.0.1:{match[1]}"
            finally:
                process.terminate()
                if reader.ident is not None:
                    reader.join()

    def command(self, *words: str) -> Sequence[str]:
        """The command line of a call.

        Raises:
            InvalidSettings: there is no kubectl.
        """
        program = shutil.which("kubectl")
        if program is None:
            raise InvalidSettings("kubectl is not found in PATH: install it, or give a URL where the command takes one")
        where = [
            *(["--context", self.context] if self.context else []),
            *(["--kubeconfig", self.kubeconfig] if self.kubeconfig else []),
            *(["--namespace", self.namespace] if self.namespace else []),
        ]
        return [program, *where, *words]


def _failed(said: str) -> InvalidSettings | Unreachable:
    """Kubectl's last words: the user's mistake, or a cluster that does not answer."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = lines[-1].removeprefix("error: ") if lines else "kubectl failed without a word"
    if re.search(r"refused|no such host|timeout|Unable to connect|TLS|x509", text):
        return Unreachable(text)
    return InvalidSettings(text)
