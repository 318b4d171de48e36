"""The console script: unknown commands, and what `extract` is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.cli import extract, main
from e2e_vl.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


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
        (["FOLDER", "--output", "o"], "many_images", ["--images", "FOLDER", "--output", "o"]),
        (["--output", "o", "--images", "x.txt"], "many_images", ["--output", "o", "--images", "x.txt"]),
    ],
)
def test_extract_tells_one_image_from_many(words, module, passed, tmp_path, monkeypatch):
    calls = []
    for name in ("one_image", "many_images"):
        monkeypatch.setattr(extract, name, lambda words, prog, name=name: calls.append((name, words)))
    words, passed = ([str(tmp_path) if word == "FOLDER" else word for word in part] for part in (words, passed))
    extract.main(words, "e2e-vl extract")
    assert calls == [(module, passed)]
