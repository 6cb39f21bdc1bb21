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

_NOT_INSTALLED = (
    "Sluice is not installed there (`helm install sluice charts/sluice`, docs/quickstart-cluster.md); "
    "is it the cluster that you mean (--context)?"
)

_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")
# What may stand where kubectl takes a name: nothing that it could take for an option, or for a kind.
_NAME = re.compile(r"[a-z0-9][-a-z0-9.]{0,252}")
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
        return _object(self._json("get", kind, checked_name(name), "-o", "json"))

    def list(self, kind: str, *words: str) -> list[Object]:
        """The objects of a kind; `words` select among them.

        Raises:
            InvalidSettings, Unreachable: as for `get`.
        """
        found = self._json("get", kind, *words, "-o", "json")
        items = found.get("items") if isinstance(found, dict) else None
        if not isinstance(items, list):
            raise InvalidSettings(f"kubectl get {kind} printed no list of objects: which program is `kubectl` in PATH?")
        return [_object(item) for item in items]

    def _json(self, *words: str) -> Any:  # noqa: ANN401  # whatever JSON says
        said = self.read(*words)
        try:
            return json.loads(said)
        except (ValueError, RecursionError) as error:
            what = f"kubectl {words[0]} {words[1]} printed no JSON: which program is `kubectl` in PATH?"
            raise InvalidSettings(what) from error

    def read(self, *words: str, timeout_s: float = _TIMEOUT_S) -> str:
        """What kubectl prints.

        Raises:
            InvalidSettings, Unreachable: as for `get`.
        """
        try:
            done = subprocess.run(  # noqa: S603  # the user's own kubectl, no shell
                self.command(*words),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            raise InvalidSettings(f"kubectl cannot be run: {error.strerror or error}") from error
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


def checked_name(name: str) -> str:
    """The name of an object, as kubectl is given it.

    Raises:
        InvalidSettings: kubectl would take it for something else.
    """
    if not _NAME.fullmatch(name):
        raise InvalidSettings(f"{name!r} is no name: lower case letters, digits, '-' and '.', a letter or digit first")
    return name


def _object(found: Any) -> Object:  # noqa: ANN401  # whatever JSON says
    """What the API server would call an object, with the parts that are read here.

    Raises:
        InvalidSettings: it is none.
    """
    metadata, *others = (
        [found.get(part) for part in ("metadata", "spec", "status")] if isinstance(found, dict) else [None]
    )
    is_named = isinstance(metadata, dict) and isinstance(metadata.get("name"), str)
    if not is_named or not all(other is None or isinstance(other, dict) for other in others):
        raise InvalidSettings("kubectl printed no object of Kubernetes: which program is `kubectl` in PATH?")
    object_: Object = found
    return object_


def _failed(said: str) -> InvalidSettings | Unreachable:
    """Kubectl's last words: the user's mistake, or a cluster that does not answer."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = lines[-1].removeprefix("error: ") if lines else "kubectl failed without a word"
    if re.search(r"doesn't have a resource type \"?inferenceservices", text):
        return InvalidSettings(f"{text}: {_NOT_INSTALLED}")
    if re.search(r"refused|no such host|timeout|Unable to connect|TLS|x509", text):
        return Unreachable(text)
    return InvalidSettings(text)
