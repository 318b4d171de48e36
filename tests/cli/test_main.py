"""The console script: its entry point, and which command a name leads to."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from e2e_vl.cli import extract, main
from e2e_vl.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gets_the_other_words_and_its_name(name, monkeypatch):
    calls = []
    module, _, function = COMMANDS[name][0].partition(":")
    module = importlib.import_module(f"e2e_vl.cli.{module}")
    monkeypatch.setattr(module, function, lambda words, prog: calls.append((words, prog)) or 3)
    assert main.main([name, "--run", "x", "key=value"]) == 3
    assert calls == [(["--run", "x", "key=value"], f"e2e-vl {name}")]


def test_an_unknown_command_is_answered_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["trian"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "'trian'" in message and all(f"'{name}'" in message for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "module", "passed"),
    [
        (["x.jpg", "--output", "o"], "one_image", ["x.jpg", "--output", "o"]),
        (["--output", "o", "x.jpg"], "one_image", ["--output", "o", "x.jpg"]),
        (["FOLDER", "--output", "o"], "many_images", ["--images", "FOLDER", "--output", "o"]),
        (["--output", "o", "--images", "x.txt"], "many_images", ["--output", "o", "--images", "x.txt"]),
        (["--images=x.json"], "many_images", ["--images=x.json"]),
    ],
)
def test_extract_tells_one_image_from_many(words, module, passed, tmp_path, monkeypatch):
    calls = []
    for name in ("one_image", "many_images"):
        monkeypatch.setattr(extract, name, lambda words, prog, name=name: calls.append((name, words)))
    words, passed = ([str(tmp_path) if word == "FOLDER" else word for word in part] for part in (words, passed))
    extract.main(words, "e2e-vl extract")
    assert calls == [(module, passed)]


def test_a_package_without_the_default_detector_asks_for_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extract, "DEFAULT_CONFIG", tmp_path / "R_101_C4.yaml")
    assert main.main(["extract", "x.jpg", "--output", str(tmp_path / "out")]) == 2
    assert "name a detector with --detector, --config or --run" in capsys.readouterr().err
