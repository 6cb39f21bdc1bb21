"""Files that are no manifests, or that only look like one: each gets one line that names the file, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

import operator_scene as scene
from sluice_operator.cli import main
from sluice_operator.errors import InvalidManifest
from sluice_operator.resource import manifest

HEAD = "apiVersion: sluice.dev/v1alpha1\nkind: InferenceService\n"
MODEL = "  model:\n    source: {image: {path: /m}}\n"


def manifest_with(model: str = "", *, spec: str = "", metadata: str = "name: chat") -> str:
    return f"{HEAD}metadata: {{{metadata}}}\nspec:\n{MODEL}    {model}\n{spec}"


def env(*variables: str) -> str:
    return f"  podTemplate: {{engine: {{env: [{', '.join(variables)}]}}}}\n"


def refused(tmp_path: Path, text: str | bytes) -> InvalidManifest:
    path = tmp_path / "file.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidManifest) as caught:
        manifest.read_specs(str(path))
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 600
    return caught.value


BOMB = "a: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
CHAIN = "a: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(manifest_with("maxLengthTokens: 0b_"), '"0b_" is not a whole number', id="an empty binary number"),
        pytest.param(manifest_with("maxLengthTokens: !!int x"), '"x" is not a whole number', id="int that is none"),
        pytest.param(manifest_with('maxLengthTokens: !!int ""'), "is not a whole number", id="int that is empty"),
        pytest.param(manifest_with("maxLengthTokens: !!float x"), '"x" is not a number', id="float that is none"),
        pytest.param(manifest_with("maxLengthTokens: !!bool x"), '"x" is not true or false', id="bool that is none"),
        pytest.param(manifest_with("maxLengthTokens: " + "9" * 5000), "out of the range", id="5,000 digits"),
        pytest.param(manifest_with("maxLengthTokens: 0x" + "f" * 5000), "out of the range", id="5,000 hex digits"),
        pytest.param(manifest_with("maxLengthTokens: 0x" + "f" * 300), "out of the range", id="300 hex digits"),
        pytest.param(manifest_with("maxLengthTokens: .nan"), "out of the range", id="not a number"),
        pytest.param(manifest_with("maxLengthTokens: 1.0e+400"), "out of the range", id="infinity by its size"),
        pytest.param(manifest_with("servedName: !!binary aGk="), "constructor for the tag", id="bytes"),
        pytest.param(manifest_with("servedName: !!set {a}"), "constructor for the tag", id="a set"),
        pytest.param(manifest_with('servedName: "\\ud800"'), "half a surrogate pair", id="a lone surrogate"),
        pytest.param(manifest_with("? [a]\n    : b"), "unhashable key", id="a list as a key"),
        pytest.param(manifest_with("~: b"), "a key is null", id="null as a key"),
        pytest.param("a: " + "[" * 3000, "deeper than 100 levels", id="3,000 levels"),
        pytest.param("".join(" " * i + "a:\n" for i in range(1, 300)), "deeper than 100", id="300 indented levels"),
        pytest.param("a: &a [*a]", "stands for what it is in", id="a list within itself"),
        pytest.param(BOMB, "holds more than", id="aliases of aliases"),
        pytest.param("- a\n" * 30_000, "holds more than 20,000 values", id="30,000 values"),
        pytest.param(CHAIN, "100 levels", id="levels by way of aliases"),
        pytest.param(manifest_with(spec=MODEL), 'line 8, column 3: key "model" is set twice', id="model twice"),
        pytest.param(manifest_with("a: 1\n    'a': 2"), 'key "a" is set twice', id="a key twice, quoted once"),
        pytest.param("a: [", "line 1, column 5: expected", id="an open bracket"),
        pytest.param(b"a: \x00", "is not YAML: unacceptable character", id="a NUL"),
        pytest.param(b"\xff\xfe", "is not UTF-8 text", id="another encoding"),
        pytest.param(b"#" * (1 << 20) + b"\n", "is larger than 1 MiB", id="more than 1 MiB"),
        pytest.param(
            manifest_with(metadata="name: chat, namespace: BAD_ns"), "metadata.namespace: Invalid value: 'BAD_ns'",
            id="a namespace that is no label",
        ),
        pytest.param(
            manifest_with(metadata="name: chat, namespace: 12"), "metadata.namespace: Invalid value: 12",
            id="a namespace that is a number",
        ),
        pytest.param(
            manifest_with(metadata="name: chat, namespace: [a]"), "metadata.namespace", id="a namespace that is a list"
        ),
        pytest.param(
            manifest_with(metadata="name: 12"), "metadata.name: Invalid value: 12: must be a string",
            id="a name that is a number",
        ),
        pytest.param(
            manifest_with(metadata=f"name: {'a' * 100_000}"), "metadata.name: Too long: may not be more than 253",
            id="a name of 100,000 letters",
        ),
        pytest.param(
            manifest_with(metadata="name: chat, labels: {a: b, c: 1}"), "metadata.labels['c']: Invalid value: 1",
            id="a label that is a number",
        ),
        pytest.param(
            manifest_with(metadata="name: chat, annotations: [a]"),
            "metadata.annotations: Invalid value: ['a']: must be a map of strings", id="annotations that are a list",
        ),
        pytest.param(
            manifest_with(metadata="name: chat, generation: x"), "metadata.generation", id="a generation in words"
        ),
        pytest.param(
            manifest_with(spec=env("{name: A}", "{name: 'A=B', value: c}")), "spec.podTemplate.engine.env[1].name",
            id="a variable with = in its name",
        ),
        pytest.param(manifest_with(spec=env('{name: "A\\0"}')), "env[0].name", id="a variable with NUL in its name"),
        pytest.param(
            manifest_with(spec=env('{name: A, value: "b\\0"}')), "env[0].value: Invalid value: 'b\\x00'",
            id="a variable with NUL in its value",
        ),
        pytest.param(
            manifest_with(spec=env("{name: A, value: 1}")), "env[0].value: Invalid value: 1: must be a string",
            id="a variable that is a number",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    assert words in str(refused(tmp_path, text))


@pytest.mark.parametrize("command", ["check", "render", "run"])
def test_every_command_refuses_such_a_file_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(manifest_with("maxLengthTokens: 0b_"))

    code = main.run([command, str(path)])

    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(f"sluice: {path}: is not YAML: line 7")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("text", ["2001-13-45", "2001-01-01", "1:30", "="])
def test_what_looks_like_a_date_or_a_time_is_text_as_in_kubernetes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(manifest_with(f"servedName: {text}"))

    (spec,) = manifest.read_specs(str(path))

    assert spec.model.served_name == text


@pytest.mark.parametrize("namespace", ["null", '""'])
def test_a_namespace_that_is_left_empty_is_the_one_of_the_command(tmp_path: Path, namespace: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(manifest_with(metadata=f"name: chat, namespace: {namespace}"))

    (spec,) = manifest.read_specs(str(path), namespace="llm")

    assert spec.namespace == "llm"


def test_render_refuses_a_namespace_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    code = main.run(["render", "-n", "BAD_ns", str(scene.EXAMPLES / "minimal.yaml")])

    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert "'BAD_ns' is no namespace" in captured.err


def test_an_endless_file_is_refused_at_once() -> None:
    with pytest.raises(InvalidManifest, match="/dev/zero: is larger than 1 MiB"):
        manifest.read_file("/dev/zero")


def test_the_examples_read_as_before() -> None:
    for path in sorted(scene.EXAMPLES.glob("[!i]*.yaml")):
        assert manifest.read_specs(str(path))
