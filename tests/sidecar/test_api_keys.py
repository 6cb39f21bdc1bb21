"""API keys: what may be one, whose it is, and that none of them is kept or told."""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mounted import Mounted
from sluice_engine.errors import InvalidConfig
from sluice_engine.watched import MOST_BYTES
from sluice_sidecar.callers.api_keys import MOST_KEYS, ApiKeys, bearer
from sluice_sidecar.callers.key_files import key_files

SECRET = b"of this process"
OLD, NEW, OTHER = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef", "sk-other-0123456789ab=="


def test_each_line_of_a_tenants_file_is_a_key_of_it() -> None:
    text = f"# rotated on Monday\n\n{OLD}\r\n  {NEW}  \n".encode()

    keys = ApiKeys.parse({"team-a": text, "team-b": OTHER.encode()}, SECRET)

    assert [keys.tenant(key) for key in (OLD, NEW, OTHER)] == ["team-a", "team-a", "team-b"]
    assert len(keys) == 3


@pytest.mark.parametrize("key", ["", OLD[:-1], OLD + "x", OLD.upper(), "# rotated on Monday", "ключ", "\udcff" * 20])
def test_what_is_almost_a_key_is_nobodys(key: str) -> None:
    assert ApiKeys.parse({"team-a": OLD.encode()}, SECRET).tenant(key) is None


@given(st.lists(st.from_regex(r"[A-Za-z0-9._~+/-]{16,40}", fullmatch=True), unique=True, max_size=20), st.data())
def test_every_key_is_recognised_and_no_other(texts: list[str], data: st.DataObject) -> None:
    split = data.draw(st.integers(0, len(texts)))
    files = {"a": "\n".join(texts[:split]).encode(), "b": "\n".join(texts[split:]).encode()}

    keys = ApiKeys.parse(files, SECRET)

    assert [keys.tenant(text) for text in texts] == ["a"] * split + ["b"] * (len(texts) - split)
    stranger = data.draw(st.text().filter(lambda text: text not in texts))
    assert keys.tenant(stranger) is None


@pytest.mark.parametrize(
    ("files", "says"),
    [
        pytest.param({"team-a": b"short"}, "team-a: line 1: must be a key of 16 to 512", id="a short one"),
        pytest.param({"team-a": b"x" * 513}, "team-a: line 1: must be a key of 16 to 512", id="a long one"),
        pytest.param({"team-a": f"{OLD}\ntwo words in a line".encode()}, "team-a: line 2", id="words"),
        pytest.param({"team-a": "schlüssel-schlüssel".encode()}, "team-a: line 1", id="not ASCII"),
        pytest.param({"team a": OLD.encode()}, "'team a': is no name of a tenant", id="no tenant"),
        pytest.param({"b": OLD.encode(), "a": OLD.encode()}, "b: line 1: is a key of tenant a as well", id="shared"),
        pytest.param({"a": "\n".join(f"sk-{n:016}" for n in range(MOST_KEYS + 1)).encode()}, "may be 10000", id="many"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_by_tenant_and_line_and_tells_no_key(
    files: Mapping[str, bytes], says: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ApiKeys.parse(files, SECRET)

    assert says in str(caught.value)
    lines = [line for content in files.values() for line in content.decode().splitlines()]
    assert not any(line in str(caught.value) for line in lines)


def test_nothing_that_is_kept_holds_a_key() -> None:
    keys = ApiKeys.parse({"team-a": OLD.encode()}, SECRET)
    gc.collect()

    assert OLD.encode() not in pickle.dumps(keys)
    assert keys == ApiKeys.parse({"team-a": OLD.encode()}, SECRET)
    assert keys != ApiKeys.parse({"team-b": OLD.encode()}, SECRET)
    assert pickle.dumps(keys) != pickle.dumps(ApiKeys.parse({"team-a": OLD.encode()}, b"of another"))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        pytest.param([f"Bearer {OLD}"], OLD, id="as everybody writes it"),
        pytest.param([f"bearer   {OLD} "], OLD, id="in another case"),
        pytest.param([], None, id="none"),
        pytest.param([f"Bearer {OLD}", f"Bearer {OLD}"], None, id="two headers"),
        pytest.param([f"Basic {OLD}"], None, id="another scheme"),
        pytest.param([OLD], None, id="no scheme"),
        pytest.param(["Bearer "], None, id="no key"),
        pytest.param([f"Bearer {OLD} {NEW}"], None, id="two keys"),
    ],
)
def test_one_authorization_header_carries_the_key(values: list[str], key: str | None) -> None:
    assert bearer(values) == key


def test_keys_rotate_with_the_mounted_secret_and_bad_ones_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mounted = Mounted(tmp_path / "keys", {"team-a": OLD})
    files = key_files(str(mounted.folder), SECRET)
    assert files.load().tenant(OLD) == "team-a"

    mounted.swap({"team-a": f"{OLD}\n{NEW}", "team-b": OTHER})
    both = files.changed()
    assert both is not None
    assert [both.tenant(key) for key in (OLD, NEW, OTHER)] == ["team-a", "team-a", "team-b"]

    mounted.swap({"team-a": f"{NEW}\nbroken"})
    assert files.changed() is None
    assert "team-a: line 2" in files.problem

    mounted.swap({"team-a": NEW})
    rotated = files.changed()
    assert rotated is not None
    assert [rotated.tenant(key) for key in (OLD, NEW, OTHER)] == [None, "team-a", None]

    mounted.swap({})
    nobody = files.changed()
    assert nobody is not None
    assert (len(nobody), files.problem) == (0, "")
    assert (files.applied_total, files.refused_total) == (3, 1)
    assert not any(key in caplog.text for key in (OLD, NEW, OTHER, "broken"))


def test_a_folder_that_vanishes_takes_no_key_away_and_one_that_is_emptied_takes_all(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "team-a").write_text(OLD)
    files = key_files(str(folder), SECRET)
    keys = files.load()
    assert keys.tenant(OLD) == "team-a"

    folder.rename(tmp_path / "elsewhere")
    assert files.changed() is None
    assert (files.refused_total, "cannot be read" in files.problem) == (1, True)

    folder.mkdir()
    emptied = files.changed()
    assert emptied is not None
    assert emptied.tenant(OLD) is None


@pytest.mark.parametrize("target", ["..data", "..nowhere"])
def test_a_link_that_leads_nowhere_changes_no_keys(tmp_path: Path, target: str) -> None:
    mounted = Mounted(tmp_path / "keys", {"chat-team": OLD.encode()})
    files = key_files(str(mounted.folder), SECRET)
    assert files.load().tenant(OLD) == "chat-team"

    (mounted.folder / "..data").unlink()
    (mounted.folder / "..data").symlink_to(target)

    assert files.changed() is None
    assert files.problem.startswith(f"{mounted.folder}: cannot be read: ")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        key_files(str(mounted.folder), SECRET).load()


def test_a_folder_that_is_not_there_or_too_large_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere: cannot be read: No such file"):
        key_files(str(tmp_path / "nowhere"), SECRET).load()
    mounted = Mounted(tmp_path / "keys", {"a": b"#" * MOST_BYTES, "b": b"#"})
    with pytest.raises(InvalidConfig, match=r"holds more than 1048576 bytes"):
        key_files(str(mounted.folder), SECRET).load()
