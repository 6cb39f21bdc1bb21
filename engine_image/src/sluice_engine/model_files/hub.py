"""A model from a Hugging Face hub: its revision pinned to a commit, its files downloaded, checked and kept.

Owns what is asked of the hub, what is asked again, and what each refusal means to a person. The library has the
addresses, the token, proxies and certificates (HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY, SSL_CERT_FILE, …); files are
streamed here, since its own downloads begin anew after every restart. Start reading at `fetch`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its own package re-exports them implicitly
    WeakFileLock,
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from sluice_engine.config import HubSource
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.hub_cache import HubCache, is_commit
from sluice_engine.model_files.hub_files import Checksum, HubFile, HubListing, model_files
from sluice_engine.sizes import bytes_in_words

log = logging.getLogger(__name__)

_HUB = "https://huggingface.co"
_TRUE = frozenset(("1", "ON", "YES", "TRUE"))
# Half a minute in all: beyond, Kubernetes' own restarts are the patience, and the download goes on where it was.
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20
_AGAIN = frozenset((408, 429, 500, 502, 503, 504))
_CODES = {
    GatedRepoError: "ModelAccessDenied",
    RepositoryNotFoundError: "ModelMissing",
    RevisionNotFoundError: "ModelMissing",
    RemoteEntryNotFoundError: "ModelMissing",
    DisabledRepoError: "ModelAccessDenied",
    HFValidationError: "ModelMissing",
}
_STATUS_CODES = {401: "ModelAccessDenied", 403: "ModelAccessDenied"}
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))

Answer = TypeVar("Answer")
Report = Callable[[LoadingProgress], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model that is on this disk now."""

    path: Path
    """A folder, or a GGUF file."""
    commit: str
    """What the revision is."""


class _Unreachable(ModelUnavailable):
    """The hub cannot be asked now; what was downloaded before may do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "HubUnreachable")


def fetch(
    source: HubSource,
    report: Report,
    *,
    environ: Mapping[str, str] = os.environ,
    sleep: Callable[[float], None] = time.sleep,
) -> Fetched:
    """The model's files on this disk, downloaded as far as they are not.

    A commit whose files are all here is not asked for. Another revision is, and what it was last is used where the hub
    cannot be reached.

    Raises:
        ModelUnavailable: one line for each way in which it cannot be had.
    """
    # The name that `requests` had for the file of a company's CA, as many clusters still set it.
    if bundle := environ.get("REQUESTS_CA_BUNDLE"):
        os.environ.setdefault("SSL_CERT_FILE", bundle)
    download = _Download(source, report, environ, sleep)
    try:
        return download.run()
    except OSError as error:
        raise ModelUnavailable(*download.disk_problem(error)) from error


class _Download:
    def __init__(
        self, source: HubSource, report: Report, environ: Mapping[str, str], sleep: Callable[[float], None]
    ) -> None:
        self._source = source
        self._report = report
        self._sleep = sleep
        self._endpoint = environ.get("HF_ENDPOINT", "").rstrip("/") or _HUB
        # Its address without a name and password in it.
        self._hub = re.sub(r"//[^/@]*@", "//", self._endpoint)
        self._is_offline = environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
        self._cache = HubCache(Path(source.cache_dir), source.repository)
        self._where = f"{source.repository} at revision {source.revision}"
        self._done_bytes = self._total_bytes = 0

    def run(self) -> Fetched:
        listing = self._listing()
        files = model_files(listing, self._source.file, self._where)
        missing = [file for file in files if not self._cache.has(listing.commit, file)]
        if missing and self._is_offline:
            names = ", ".join(file.name for file in missing[:3])
            problem = f"HF_HUB_OFFLINE is set, and {self._cache.root} lacks or has damaged {names} of {self._where}"
            raise ModelUnavailable(problem, "ModelMissing")
        self._total_bytes = sum(file.size_bytes for file in files)
        self._done_bytes = self._total_bytes - sum(file.size_bytes for file in missing)
        if missing:
            self._require_room(missing)
            log.info("downloading", extra={"repository": self._source.repository, "commit": listing.commit})
        self._tell(0)
        for file in files:
            if file in missing:
                self._cache.make_folders(listing.commit, file)
                with WeakFileLock(self._cache.lock(file)):
                    self._get(listing.commit, file)
            elif file.checksum:
                self._cache.link(listing.commit, file)
        if not self._is_offline:
            self._cache.keep_ref(self._source.revision, listing.commit)
        snapshot = self._cache.snapshot(listing.commit)
        return Fetched(snapshot / self._source.file if self._source.file else snapshot, listing.commit)

    def _listing(self) -> HubListing:
        commit = self._cache.commit_of(self._source.revision)
        kept = self._cache.listing(commit) if commit is not None else None
        if self._is_offline:
            if kept is None:
                problem = f"HF_HUB_OFFLINE is set, and {self._cache.root} does not hold {self._where}"
                raise ModelUnavailable(problem, "ModelMissing")
            return kept
        if kept is not None and is_commit(self._source.revision) and self._is_whole(kept):
            return kept
        try:
            listing = self._again_and_again(self._ask)
        except _Unreachable as error:
            if kept is None or not self._is_whole(kept):
                raise
            log.warning("hub not reached: a kept commit is used", extra={"commit": commit, "error": str(error)})
            return kept
        self._cache.keep_listing(listing)
        return listing

    def _is_whole(self, listing: HubListing) -> bool:
        try:
            files = model_files(listing, self._source.file, self._where)
        except ModelUnavailable:
            return False
        return all(self._cache.has(listing.commit, file) for file in files)

    def _ask(self) -> HubListing:
        info = HfApi(endpoint=self._endpoint).model_info(
            self._source.repository, revision=self._source.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
        files = tuple(
            HubFile(
                name=one.rfilename,
                size_bytes=(one.lfs.size if one.lfs else one.size) or 0,
                checksum=(one.lfs.sha256 if one.lfs else one.blob_id) or "",
            )
            for one in info.siblings or ()
        )
        if not info.sha or not is_commit(info.sha):
            raise ModelUnavailable(f"{self._hub} is no hub: it names no commit of {self._where}", "HubUnreachable")
        return HubListing(commit=info.sha, files=files)

    def _get(self, commit: str, file: HubFile) -> None:
        if not file.checksum:
            raise ModelUnavailable(f"{self._hub} tells no checksum of {file.name}", "ModelCorrupt")
        if self._cache.has(commit, file):  # another pod was faster
            self._cache.link(commit, file)
            self._tell(file.size_bytes)
            return
        self._cache.forget(commit, file)
        part = self._cache.part(file)
        for _ in range(2):  # a proxy's damaged copy, or the rest of somebody else's download
            before = self._done_bytes
            if self._stream_all(commit, file, part):
                self._cache.place(commit, file)
                return
            log.warning("checksum mismatch", extra={"file": file.name})
            part.unlink(missing_ok=True)
            self._tell(before - self._done_bytes)
        problem = f"{file.name} of {self._where} came twice with another checksum than {self._hub} says it has"
        raise ModelUnavailable(problem, "ModelCorrupt")

    def _stream_all(self, commit: str, file: HubFile, part: Path) -> bool:
        """Download what is missing of a file; whether it is the right one then."""
        checksum = Checksum(file)
        with part.open("a+b") as opened:
            opened.seek(0)
            while content := opened.read(_CHUNK_BYTES):
                checksum.add(content)
            if opened.tell() > file.size_bytes:
                opened.truncate(0)
                opened.seek(0)
                checksum = Checksum(file)
            self._tell(opened.tell())
            url = hf_hub_url(self._source.repository, file.name, revision=commit, endpoint=self._endpoint)

            def rest() -> int:
                headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
                start = opened.tell()
                if start:
                    headers["Range"] = f"bytes={start}-"
                with http_stream_backoff(
                    "GET", url, headers=headers, timeout=_TIMEOUT_S, retry_on_exceptions=(), retry_on_status_codes=()
                ) as answer:
                    hf_raise_for_status(answer)
                    # A server that knows no ranges sends the beginning again.
                    skip = start if answer.status_code != httpx2.codes.PARTIAL_CONTENT else 0
                    for content in answer.iter_bytes():  # as it comes: what a cut leaves is kept
                        fresh, skip = content[skip:], max(0, skip - len(content))
                        if opened.tell() + len(fresh) > file.size_bytes:
                            return file.size_bytes + 1
                        opened.write(fresh)
                        checksum.add(fresh)
                        self._tell(len(fresh))
                if opened.tell() < file.size_bytes:
                    raise httpx2.RemoteProtocolError(f"{file.name} ended after {opened.tell()} bytes")
                return opened.tell()

            size = opened.tell()
            if size < file.size_bytes:
                size = self._again_and_again(rest, progressed=opened.tell)
            opened.flush()
            os.fsync(opened.fileno())
        return size == file.size_bytes and checksum.is_right

    def _again_and_again(self, ask: Callable[[], Answer], progressed: Callable[[], int] = lambda: 0) -> Answer:
        failures = 0
        while True:
            before = progressed()
            try:
                return ask()
            except (HfHubHTTPError, httpx2.TransportError, httpx2.TooManyRedirects, HFValidationError) as error:
                refusal = self._refusal(error)
                if not isinstance(refusal, _Unreachable):
                    raise refusal from error
                failures = 0 if progressed() > before else failures + 1
                if failures > len(_WAITS_S):
                    raise refusal from error
                log.warning("hub not reached: asking again", extra={"error": str(refusal)})
                self._sleep(_WAITS_S[max(0, failures - 1)])
            except ValueError as error:  # its answer is no JSON
                raise ModelUnavailable(f"{self._hub} is no hub: its answer cannot be read", "HubUnreachable") from error

    def _refusal(self, error: Exception) -> ModelUnavailable:
        """What an error of the hub's means to a person; `_Unreachable` where asking again may help."""
        repository = self._source.repository
        token = (
            "the token may not read it" if get_token() else "it needs a token: model.source.huggingFace.tokenSecretRef"
        )
        match error:
            case GatedRepoError():
                problem = f"{repository} is gated on {self._hub}: its terms must be accepted there, and {token}"
            case RepositoryNotFoundError():
                problem = f"{self._hub} has no model {repository}, or {token}"
            case RevisionNotFoundError():
                problem = f"{repository} has no revision {self._source.revision}"
            case RemoteEntryNotFoundError():
                problem = f"a file that {self._where} lists is not on {self._hub}"
            case DisabledRepoError():
                problem = f"{self._hub} has disabled {repository}"
            case HFValidationError():
                problem = f"{repository!r} is no repository's name: write org/name"
            case HfHubHTTPError():
                return self._status_problem(error.response.status_code)
            case _:
                return self._transport_problem(error)
        return ModelUnavailable(problem, _CODES[type(error)])

    def _transport_problem(self, error: Exception) -> ModelUnavailable:
        text = " ".join(str(error).split()) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            problem = f"the certificate of {self._hub} is not trusted: name the CA's file in SSL_CERT_FILE"
            return ModelUnavailable(problem, "HubUnreachable")
        return _Unreachable(f"{self._hub} cannot be reached: {text}")

    def _status_problem(self, status: int) -> ModelUnavailable:
        if status in _STATUS_CODES:
            problem = f"{self._hub} does not let this token read {self._source.repository} (status {status})"
            return ModelUnavailable(problem, _STATUS_CODES[status])
        if status in _AGAIN:
            return _Unreachable(f"{self._hub} answers with status {status}")
        return ModelUnavailable(f"{self._hub} answers with status {status}: is it a hub?", "HubUnreachable")

    def disk_problem(self, error: OSError) -> tuple[str, str]:
        """What an error of the cache folder's means to a person, and its code."""
        if error.errno in _FULL:
            return f"{self._cache.root} has no space left for {self._where}", "DiskFull"
        return f"{self._cache.root} cannot be used as a cache: {error.strerror or error}", "ModelCacheUnusable"

    def _require_room(self, missing: list[HubFile]) -> None:
        self._cache.root.mkdir(parents=True, exist_ok=True)
        parts = (self._cache.part(file) for file in missing)
        needed = sum(file.size_bytes for file in missing) - sum(one.stat().st_size for one in parts if one.exists())
        free = shutil.disk_usage(self._cache.root).free
        if needed > free:
            free_words, needed_words = bytes_in_words(free), bytes_in_words(needed)
            problem = f"{self._cache.root} has {free_words} free, and {self._where} needs {needed_words} more"
            raise ModelUnavailable(problem, "DiskFull")

    def _tell(self, more_bytes: int) -> None:
        self._done_bytes += more_bytes
        self._report(LoadingProgress(stage="download", bytes_done=self._done_bytes, bytes_total=self._total_bytes))
