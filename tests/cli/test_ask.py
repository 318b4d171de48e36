"""`e2e-vl ask` of many questions: folders, JSON files, images that cannot be read, and models of the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import e2e_vl
from e2e_vl.api import model as trained_model
from e2e_vl.cli import predict
from tests.cli.calls import first_image

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def folder(trained_run, tmp_path) -> Path:
    """One good image, one that is cut off, one that is empty, and another good one."""
    photos = tmp_path / "photos"
    photos.mkdir()
    image = first_image(trained_run.path)
    for name in ("a.jpg", "d.jpg"):
        shutil.copy(image, photos / name)
    (photos / "b.jpg").write_bytes(image.read_bytes()[:500])
    (photos / "c.jpg").touch()
    return photos


def call(run: object, *words: object) -> int:
    return predict.ask_main([str(word) for word in ("--run", run, *words)])


def error_of(run: object, capsys, *words: object) -> str:
    assert call(run, *words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


def test_bad_images_of_a_folder_do_not_lose_the_other_answers(trained_run, folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(trained_run.path, "--image", folder, "--text", "the red elephant", "--output", out) == 2
    printed = capsys.readouterr()
    assert sorted(path.name for path in out.iterdir()) == ["0001", "0004"]
    assert json.loads((out / "0004" / "answer.json").read_text("utf-8"))["image"] == str(folder / "d.jpg")
    assert printed.err.startswith("error: 2 of 4 questions have no answer: ") and printed.err.count("\n") == 1
    assert "b.jpg" in printed.err and "c.jpg" in printed.err and "a.jpg" not in printed.err
    assert printed.out.count("words that the vocabulary lacks: elephant\n") == 2 and "Warning" not in printed.err
    expected = e2e_vl.load(trained_run.path).ask(folder / "a.jpg", "the red circle")
    assert call(trained_run.path, "--image", folder / "a.jpg", "--text", "the red circle") == 0
    assert expected.answer in capsys.readouterr().out


def test_a_box_that_leaves_one_image(trained_run, folder, capsys):
    message = error_of(trained_run.path, capsys, "--image", folder / "a.jpg", "--text", "x", "--boxes", "1,1,9000,50")
    assert "--boxes: box 0 [1, 1, 9000, 50] lies outside the image" in message and "a.jpg" in message
    (folder / "none.json").write_text("[]")
    words = ("--image", folder / "a.jpg", "--text", "x", "--boxes", folder / "none.json")
    assert "there is no box" in error_of(trained_run.path, capsys, *words)


@pytest.mark.parametrize(
    "content",
    [
        {"image": "a.jpg", "text": "x"},
        [],
        ["x"],
        [{"image": "a.jpg"}],
        [{"image": "a.jpg", "text": "x", "boxes": []}],
        [{"image": "a.jpg", "text": 3}],
        [{"image": ["a.jpg"], "text": "x"}],
    ],
)
def test_json_files_of_another_form(trained_run, tmp_path, capsys, content):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(content))
    message = error_of(trained_run.path, capsys, "--json", path)
    assert "questions.json" in message or content == []


@pytest.mark.parametrize("words", ["--json q.json --text x", "--json q.json --pair", "--text x"])
def test_a_question_is_given_once_and_whole(trained_run, capsys, words):
    error_of(trained_run.path, capsys, *words.split())


def test_random_boxes_are_said_in_one_line(pretraining_run, capsys):
    assert call(pretraining_run, "--image", first_image(pretraining_run), "--text", "a [MASK] circle") == 0
    printed = capsys.readouterr()
    assert printed.out.count("it looks at random places") == 1 and printed.err == ""


def test_a_model_of_the_hub(trained_run, folder, capsys, monkeypatch):
    monkeypatch.setattr(trained_model, "snapshot_download", lambda name: str(trained_run.path / "model"))
    assert call("someone/model", "--image", folder / "a.jpg", "--text", "the star") == 0
    assert "x " in capsys.readouterr().out
