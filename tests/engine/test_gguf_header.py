from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.gguf_header import read_metadata


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float64("a.share", 0.5)
    writer.add_bool("a.flag", val=True)
    writer.add_array("a.words", ["x", "é", ""])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_scalars_and_arrays_are_read_as_the_reference_writer_wrote_them(small: Path) -> None:
    assert read_metadata(small) == {
        "general.architecture": "llama",
        "a.count": 7,
        "a.share": 0.5,
        "a.flag": True,
        "a.words": ["x", "é", ""],
        "a.numbers": [1, -2, 3],
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "empty", id="an empty file"),
        pytest.param(b"PK\x03\x04" + bytes(40), "does not start with GGUF", id="another kind of file"),
        pytest.param(struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9", id="another version"),
        pytest.param(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "ends early", id="a count beyond the file"),
    ],
)
def test_what_is_not_gguf_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelUnavailable, match=says) as caught:
        read_metadata(path)
    assert caught.value.code == "ModelCorrupt"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found_or_harmless_and_never_a_crash(small: Path, data: st.DataObject) -> None:
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = small.with_name("damaged.gguf")
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])

    try:
        read_metadata(damaged)
    except ModelUnavailable as error:
        assert "\n" not in str(error)  # noqa: PT017  # either way is right; what matters is the kind of error
