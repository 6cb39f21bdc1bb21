"""What a run is told as: text, JSON, PNG, one page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from simulator.scenes import SMALL, document, found
from sluice_operator.cli import main
from sluice_simulator import page, report

QUICK = {**SMALL, "duration": "3s"}


@pytest.fixture
def small_file(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(QUICK))
    return str(path)


def test_the_command_prints_lines_or_one_document(capsys: pytest.CaptureFixture[str], small_file: str) -> None:
    assert main.run(["simulate", small_file]) == 0
    lines = capsys.readouterr().out
    assert main.run(["simulate", small_file, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert lines.startswith("small: ")
    assert f"{told['total']['goodput_per_second']:,.2f} good requests/s" in lines
    assert told["schema"] == report.SCHEMA
    assert lines.splitlines() == report.text(told)


def test_a_sweep_compares_runs(capsys: pytest.CaptureFixture[str], small_file: str) -> None:
    code = main.run(["simulate", small_file, "--sweep", "replicas=1..3", "--sweep", "seed=1,2", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [run["set"] for run in told["runs"]] == [{"replicas": r, "seed": s} for r in (1, 2, 3) for s in (1, 2)]
    assert [run["replicas"] for run in told["runs"]] == [1, 1, 2, 2, 3, 3]


def test_a_policy_is_the_crds_field(capsys: pytest.CaptureFixture[str], small_file: str) -> None:
    main.run(["simulate", small_file, "--policy", "NoSuchPolicy"])

    assert "spec.scheduling.policy" in capsys.readouterr().err


def test_pictures_and_pages_are_written_and_the_same_each_time(
    capsys: pytest.CaptureFixture[str], small_file: str, tmp_path: Path
) -> None:
    written = []
    for number in range(2):
        png, html = tmp_path / f"{number}.png", tmp_path / f"{number}.html"
        assert main.run(["simulate", small_file, "--plot", str(png), "--html", str(html)]) == 0
        written.append((png.read_bytes(), html.read_bytes()))

    assert written[0] == written[1]
    assert written[0][0].startswith(b"\x89PNG")
    capsys.readouterr()


def test_a_sweep_is_drawn_as_curves(capsys: pytest.CaptureFixture[str], small_file: str, tmp_path: Path) -> None:
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    sweeps = ["--sweep", "replicas=1,2", "--sweep", "router=RoundRobin,LeastLoaded"]

    assert main.run(["simulate", small_file, *sweeps, "--plot", str(png), "--html", str(html)]) == 0

    assert png.read_bytes().startswith(b"\x89PNG")
    assert html.read_text().count("<polyline") == 8
    capsys.readouterr()


def test_a_file_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str], small_file: str) -> None:
    assert main.run(["simulate", small_file, "--html", "/nowhere/at/all.html"]) == 2

    assert capsys.readouterr().err == "sluice: /nowhere/at/all.html: cannot be written: No such file or directory\n"


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.data = ""
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [name for name, _ in attrs if name in {"src", "href"}]
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data, self._in_data = data, False


def test_the_page_loads_nothing_and_holds_the_document() -> None:
    told = found(document(duration="3s", name="</script><b>"))
    parser = _Loads()
    text = page.html(told)
    parser.feed(text)

    assert parser.outside == []
    assert json.loads(parser.data) == told
    assert "<b>" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_matplotlib_is_imported_only_when_asked(small_file: str) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from sluice_operator.cli import main\n"
        f"sys.exit(main.run(['simulate', {small_file!r}, '--json']))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_without_matplotlib_a_picture_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small_file: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    assert main.run(["simulate", small_file, "--plot", "x.png"]) == 2

    assert capsys.readouterr().err == "sluice: --plot: needs matplotlib: install sluice-simulator[plot]\n"
