"""A model from a hub: pinned, downloaded, checked, kept; and each way in which it cannot be had, in one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, REPOSITORY, HubServer
from sluice_engine.config import HubSource
from sluice_engine.core.state import LoadingProgress
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.hub import Fetched, fetch
from sluice_engine.model_files.hub_cache import HubCache

WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "README.md": b"# no part of a model",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "original/params.json": b"{}",
    "tiny.Q4_1.gguf": WEIGHTS + b"G",
}
MODEL_FILES = ["config.json", "model.safetensors", "tokenizer.json"]
MODEL_BYTES = sum(len(FILES[name]) for name in MODEL_FILES)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "hub"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with HubServer(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")) or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))


class Download:
    """Downloads into one cache folder, and what was reported, waited and returned."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.told: list[LoadingProgress] = []
        self.waits: list[float] = []

    def __call__(self, revision: str = "main", file: str = "", repository: str = REPOSITORY, **env: str) -> Fetched:
        source = HubSource(repository=repository, revision=revision, file=file, cache_dir=str(self.folder))
        environ = {"HF_ENDPOINT": self.hub.url, **env}
        return fetch(source, self.told.append, environ=environ, sleep=self.waits.append)

    def refusal(self, *arguments: Any, **options: Any) -> tuple[str, str]:
        with pytest.raises(ModelUnavailable) as caught:
            self(*arguments, **options)
        assert "\n" not in str(caught.value)
        return caught.value.code, str(caught.value)


@pytest.fixture
def download(hub: HubServer, tmp_path: Path) -> Download:
    return Download(hub, tmp_path / "cache")


def names(fetched: Fetched) -> list[str]:
    return sorted(str(path.relative_to(fetched.path)) for path in fetched.path.rglob("*") if path.is_file())


def test_what_the_engine_reads_is_downloaded_and_nothing_else(download: Download) -> None:
    fetched = download()

    assert fetched.commit == COMMIT
    assert names(fetched) == MODEL_FILES
    assert (fetched.path / "model.safetensors").read_bytes() == WEIGHTS
    assert download.told[0] == LoadingProgress(stage="download", bytes_total=MODEL_BYTES)
    assert download.told[-1] == LoadingProgress(stage="download", bytes_done=MODEL_BYTES, bytes_total=MODEL_BYTES)
    assert all(f"/resolve/{COMMIT}/" in path for path in download.hub.paths("resolve")), "the commit, not the branch"


def test_one_gguf_file_is_downloaded_by_its_name(download: Download) -> None:
    fetched = download(file="tiny.Q4_1.gguf")

    assert fetched.path.read_bytes() == FILES["tiny.Q4_1.gguf"]
    assert len(download.hub.paths("resolve")) == 1


def test_shards_come_with_their_index(hub: HubServer, download: Download) -> None:
    (hub.folder / "model.safetensors").unlink()
    for name in (
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ):
        (hub.folder / name).write_bytes(name.encode())

    assert names(download()) == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip


def test_a_second_start_asks_only_what_the_revision_is_now(hub: HubServer, download: Download) -> None:
    first = download()
    hub.asked.clear()

    assert download() == first
    assert len(hub.asked) == 1
    assert hub.paths("/revision/main")


def test_a_pinned_commit_that_is_here_is_not_asked_for_at_all(hub: HubServer, download: Download) -> None:
    first = download(COMMIT)
    hub.asked.clear()

    assert download(COMMIT) == first
    assert hub.asked == []


def test_a_branch_that_moved_is_followed_and_what_did_not_change_is_kept(hub: HubServer, download: Download) -> None:
    download()
    moved = "f" * 40
    hub.revisions |= {"main": moved, moved: moved}
    (hub.folder / "config.json").write_bytes(b'{"new": 1}')
    hub.asked.clear()

    fetched = download()

    assert fetched.commit == moved
    assert (fetched.path / "config.json").read_bytes() == b'{"new": 1}'
    assert len(hub.paths("resolve")) == 1


def test_a_download_that_was_cut_goes_on_where_it_was(hub: HubServer, download: Download) -> None:
    hub.cut_after = [5000, 3000]

    fetched = download()

    assert (fetched.path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [headers.get("range") for path, headers in hub.asked if "/store/" in path]
    assert ranges == [None, "bytes=5000-", "bytes=8000-"]
    assert len(download.waits) == 2
    assert download.told[-1].bytes_done == MODEL_BYTES


def test_a_start_that_was_killed_leaves_what_the_next_one_goes_on_with(hub: HubServer, download: Download) -> None:
    hub.cut_after = [6000, 0, 0, 0, 0, 0, 0]
    assert download.refusal()[0] == "HubUnreachable"
    hub.asked.clear()
    hub.cut_after = []

    download()

    assert [headers.get("range") for path, headers in hub.asked if "/store/" in path] == ["bytes=6000-"]


def test_a_server_without_ranges_sends_the_beginning_again(hub: HubServer, download: Download) -> None:
    hub.cut_after, hub.knows_ranges = [5000], False

    assert (download().path / "model.safetensors").read_bytes() == WEIGHTS
    assert download.told[-1].bytes_done == MODEL_BYTES


def test_damaged_content_is_noticed_and_asked_for_again(hub: HubServer, download: Download) -> None:
    hub.damage = 1

    assert (download().path / "model.safetensors").read_bytes() == WEIGHTS
    assert download.told[-1].bytes_done == MODEL_BYTES


def test_content_that_stays_damaged_ends_in_a_checksum_mismatch(hub: HubServer, download: Download) -> None:
    hub.damage = 2

    code, text = download.refusal()

    assert code == "ModelCorrupt"
    assert text.startswith(f"model.safetensors of {REPOSITORY} at revision main came twice with another checksum")


def test_a_file_that_is_longer_than_was_listed_takes_nothing_from_the_progress(
    hub: HubServer, download: Download
) -> None:
    listed = hub.siblings()
    hub.siblings = lambda: [{**one, "size": one["size"] // 2} for one in listed]  # type: ignore[method-assign]

    assert download.refusal()[0] == "ModelCorrupt"
    assert min(told.bytes_done for told in download.told) == 0


def test_a_small_file_that_changed_on_the_way_is_noticed_too(hub: HubServer, download: Download) -> None:
    listed = hub.siblings()
    hub.siblings = lambda: [{**one, "blobId": "0" * 40} for one in listed]  # type: ignore[method-assign]

    assert download.refusal()[0] == "ModelCorrupt"


def test_what_somebody_damaged_in_the_cache_is_downloaded_again(hub: HubServer, download: Download) -> None:
    fetched = download()
    for mark in (download.folder / "models--acme--tiny/.sluice").glob("*.right"):
        mark.unlink()
    (fetched.path / "model.safetensors").resolve().write_bytes(WEIGHTS[::-1])

    assert (download().path / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_busy_is_asked_again(hub: HubServer, download: Download, status: int) -> None:
    hub.statuses = [status, status]

    assert names(download()) == MODEL_FILES
    assert download.waits == [1.0, 2.0]


def test_a_hub_that_stays_away_is_told_after_half_a_minute(hub: HubServer, download: Download) -> None:
    hub.statuses = [503] * 20

    assert download.refusal() == ("HubUnreachable", f"{hub.url} answers with status 503")
    assert download.waits == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_without_a_network_what_was_downloaded_before_is_used(hub: HubServer, download: Download) -> None:
    first = download()
    hub.statuses = [503] * 20

    assert download() == first


def test_no_network(download: Download) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://someone:secret@127.0.0.1:{closed.getsockname()[1]}"

        code, text = download.refusal(HF_ENDPOINT=url)

    assert code == "HubUnreachable"
    assert text.startswith("http://127.0.0.1:")
    assert "cannot be reached" in text
    assert "secret" not in text


def test_offline_takes_what_is_here_and_asks_nobody(hub: HubServer, download: Download) -> None:
    first = download()
    hub.asked.clear()

    assert download(HF_HUB_OFFLINE="1") == first
    assert download(COMMIT, HF_HUB_OFFLINE="1") == first
    assert hub.asked == []


def test_offline_without_the_model_says_so(hub: HubServer, download: Download) -> None:
    code, text = download.refusal(HF_HUB_OFFLINE="1")

    assert code == "ModelMissing"
    assert text == f"HF_HUB_OFFLINE is set, and {download.folder} does not hold {REPOSITORY} at revision main"
    assert hub.asked == []


def test_offline_with_a_damaged_file_names_it(download: Download) -> None:
    fetched = download()
    (fetched.path / "tokenizer.json").resolve().write_bytes(b"")

    code, text = download.refusal(HF_HUB_OFFLINE="1")

    assert (code, "lacks or has damaged tokenizer.json" in text) == ("ModelMissing", True)


def test_a_cache_that_the_library_filled_is_used_offline(hub: HubServer, download: Download) -> None:
    # Its layout: content by checksum, names that point to it, and the revision.
    folder = download.folder / "models--acme--tiny"
    for one in hub.siblings():
        if one["rfilename"] in MODEL_FILES:
            blob = folder / "blobs" / (one["lfs"]["sha256"] if "lfs" in one else one["blobId"])
            name = folder / "snapshots" / COMMIT / one["rfilename"]
            for path in (blob, name):
                path.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(FILES[one["rfilename"]])
            name.symlink_to(os.path.relpath(blob, name.parent))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT)

    assert names(download(HF_HUB_OFFLINE="1")) == MODEL_FILES
    assert names(download()) == MODEL_FILES
    assert hub.paths("resolve") == []


def test_what_is_downloaded_here_is_found_by_the_library(download: Download) -> None:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # after the environment is set

    download()

    for revision in ("main", COMMIT):
        found = try_to_load_from_cache(REPOSITORY, "config.json", cache_dir=download.folder, revision=revision)
        assert isinstance(found, str)
        assert Path(found).read_bytes() == FILES["config.json"]


def test_a_token_opens_a_private_model_and_leaves_the_hub_for_no_other_host(
    hub: HubServer, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")

    download()

    sent = {"/store/" in path: headers.get("authorization") for path, headers in hub.asked}
    assert sent == {False: "Bearer hf_right", True: None}


@pytest.mark.parametrize(
    ("options", "scene", "token", "code", "says"),
    [
        pytest.param(
            {"repository": "acme/none"},
            {},
            "",
            "ModelMissing",
            "has no model acme/none, or it needs a token: model.source.huggingFace.tokenSecretRef",
            id="no such repository",
        ),
        pytest.param(
            {}, {"token": "hf_x"}, "", "ModelMissing", "or it needs a token", id="a private one without a token"
        ),
        pytest.param(
            {"repository": "acme/none"},
            {"token": "hf_x"},
            "hf_x",
            "ModelMissing",
            "or the token may not read it",
            id="no such repository with a token",
        ),
        pytest.param(
            {},
            {"token": "hf_x"},
            "hf_wrong",
            "ModelAccessDenied",
            "does not let this token read acme/tiny (status 401)",
            id="a wrong token",
        ),
        pytest.param(
            {}, {"is_gated": True}, "", "ModelAccessDenied", "acme/tiny is gated on", id="gated without a token"
        ),
        pytest.param(
            {},
            {"is_gated": True},
            "hf_other",
            "ModelAccessDenied",
            "its terms must be accepted there",
            id="gated with a token",
        ),
        pytest.param({}, {"statuses": [403]}, "hf_x", "ModelAccessDenied", "(status 403)", id="forbidden"),
        pytest.param({"revision": "v9"}, {}, "", "ModelMissing", "acme/tiny has no revision v9", id="no such revision"),
        pytest.param(
            {"file": "x.gguf"},
            {},
            "",
            "ModelMissing",
            "has no file x.gguf; its GGUF files are tiny.Q4_1.gguf",
            id="no such file",
        ),
        pytest.param(
            {}, {"statuses": [404]}, "", "HubUnreachable", "answers with status 404: is it a hub?", id="no hub"
        ),
    ],
)
def test_a_refusal_is_one_line_and_final(
    hub: HubServer,
    download: Download,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    scene: dict[str, Any],
    token: str,
    code: str,
    says: str,
) -> None:
    for name, value in scene.items():
        setattr(hub, name, value)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)

    found, text = download.refusal(**options)

    assert (found, says in text) == (code, True), text
    assert download.waits == []
    assert not token or token not in text


@pytest.mark.parametrize(
    ("gone", "code", "says"),
    [
        pytest.param(
            "config.json",
            "ModelMissing",
            "no config.json at its root; its GGUF files are tiny.Q4_1.gguf: name one",
            id="no directory",
        ),
        pytest.param(
            "model.safetensors",
            "ModelUnsupported",
            "neither model.safetensors nor model.safetensors.index.json",
            id="no safetensors",
        ),
    ],
)
def test_a_repository_of_another_kind_is_told(
    hub: HubServer, download: Download, gone: str, code: str, says: str
) -> None:
    (hub.folder / gone).unlink()

    found, text = download.refusal()

    assert (found, says in text) == (code, True), text


def test_a_full_disk_is_told_before_the_download(download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _path: os.terminal_size((0, 0)) and type("Usage", (), {"free": 100})
    )

    code, text = download.refusal()

    assert code == "DiskFull"
    assert text == f"{download.folder} has 0.0 MB free, and {REPOSITORY} at revision main needs 0.0 MB more"
    assert download.hub.paths("resolve") == []


def test_a_disk_that_fills_meanwhile_is_told(download: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    assert download.refusal() == ("DiskFull", f"{download.folder} has no space left for {REPOSITORY} at revision main")


def test_a_cache_that_is_no_folder_is_told(download: Download) -> None:
    download.folder.write_text("")

    code, text = download.refusal()

    assert code == "ModelCacheUnusable"
    assert text.startswith(f"{download.folder} cannot be used as a cache: ")


def test_a_file_system_without_links_holds_the_files_themselves(
    download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: Path, _target: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)

    fetched = download()

    assert (fetched.path / "model.safetensors").read_bytes() == WEIGHTS
    assert not (fetched.path / "model.safetensors").is_symlink()
    download.hub.asked.clear()
    assert download(COMMIT) == fetched
    assert download.hub.asked == []


def test_what_another_pod_downloaded_meanwhile_is_taken(
    hub: HubServer, download: Download, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Download(hub, download.folder)
    make_folders = HubCache.make_folders

    def first_the_other(cache: HubCache, *arguments: Any) -> None:
        monkeypatch.setattr(HubCache, "make_folders", make_folders)
        other()
        hub.asked.clear()
        make_folders(cache, *arguments)

    monkeypatch.setattr(HubCache, "make_folders", first_the_other)

    assert names(download()) == MODEL_FILES
    assert hub.paths("resolve") == []
    assert download.told[-1].bytes_done == MODEL_BYTES
