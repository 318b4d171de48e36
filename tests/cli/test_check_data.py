"""The command: what it prints, its JSON file and its exit status."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from e2e_vl.cli import check_data as tool

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"


def words(root: Path, *more: object, name: str = "refcoco") -> list[str]:
    return [str(word) for word in ("--config", TINY / f"{name}.yaml", *more, f"data.root={root}")]


def root_of(tiny_words: list[str]) -> Path:
    return Path(next(word.removeprefix("data.root=") for word in tiny_words if word.startswith("data.root=")))


def test_intact_data(tiny_words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "new" / "found.json"
    assert tool.main(words(root_of(tiny_words), "--json", output)) == 0
    printed = capsys.readouterr().out
    assert "train (trained on):" in printed and "val (evaluated):" in printed and "6 images" in printed
    assert "no problem found" in printed
    found = json.loads(output.read_text())
    assert found["problems"] == [] and found["splits"][1]["images"] == 6


def test_broken_data(tiny_words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    root = shutil.copytree(root_of(tiny_words), tmp_path / "data")
    path = root / "refcoco+" / "instances.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        annotation["bbox"][3] = -1
    path.write_text(json.dumps(content))
    assert tool.main(words(root, "--examples", 2)) == 1
    printed = capsys.readouterr().out
    shown = [line for line in printed.splitlines() if line.startswith("PROBLEM") and "is empty or inverted" in line]
    assert len(shown) == 2
    assert re.search(r"\.\.\. and \d+ more of this kind", printed)  # each ref to one of them


def test_shared_photos(tiny_words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    root = root_of(tiny_words)
    other = tmp_path / "other.yaml"
    other.write_text(f"base: {TINY / 'vqa.yaml'}\ndata: {{root: {root}, train_split: val}}\n")
    assert tool.main(words(root, "--with", other)) == 0
    assert "SHARED: 6 of 6 photos of val are in the training split val of" in capsys.readouterr().out
    assert tool.main(words(root, "--with", other, "--no-overlap")) == 1


def test_bad_options_are_one_sentence(tmp_path, capsys):
    assert tool.main(words(tmp_path, "--processes", 0)) == 2
    assert "--processes is 0; give a positive number." in capsys.readouterr().err
    assert tool.main(words(tmp_path, "--images", 0)) == 2
    assert capsys.readouterr().err == "error: --images is 0; give a positive number.\n"
