"""Values of another kind in settings, which OmegaConf would turn into something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.config import load_config

BASE = Path(__file__).parents[1] / "configs" / "tiny" / "refcoco.yaml"


def load(folder: Path, text: str):
    path = folder / "own.yaml"
    path.write_text(f"base: {BASE}\n{text}\n")
    return load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output: yes", "setting 'output' is True, which is no text; write it in quotes"),
        ("output: .nan", "setting 'output' is nan, which is no text"),
        ("output: ' '", "setting 'output' is ' ', a blank text"),
        ("output: ''", "setting 'output' is '', a blank text"),
        (f"output: {'y' * 5000}", "setting 'output' has 5000 characters; a text has at most 4096"),
        (f"output: {'y' * 300}", r"output 'y+\.\.\.y+' cannot be looked for \(file name too long\); give another path"),
        ("output: ~nobody_of_this_name/x", "output '~nobody_of_this_name/x' cannot be looked for"),
        ("detector: {weights: ''}", "setting 'detector.weights' is '', a blank text"),
        ("encoder: {weights: off}", "setting 'encoder.weights' is False, which is no text"),
        ("data: {eval_splits: [val, no]}", "setting 'data.eval_splits', entry 1 is False, which is no text"),
        ("data: {files: {images: 1.5}}", "setting 'data.files.images' is 1.5, which is no text"),
        ("data: {synthetic: {formats: ['']}}", "setting 'data.synthetic.formats', entry 0 is '', a blank text"),
        ("detector: true", "setting 'detector' is True; it must be a mapping"),
        ("detector: ${data.root}", r"setting 'detector' is '\$\{data.root\}'; it must be a mapping"),
        ("task: {config: x}", "setting 'task.config' is 'x'; it must be a mapping"),
        ("data: {resize: 600}", "setting 'data.resize' is 600; it must be a mapping"),
        ("detector: {freeze: -1}", "setting 'detector.freeze' is -1; it must be true or false"),
        ("data: {skip_broken: 16}", "setting 'data.skip_broken' is 16; it must be true or false"),
        ("data: {flip: -1}", "data.flip is -1.0; it must be a probability, from 0 to 1"),
        ("data: {flip: .nan}", "data.flip is nan; it must be a probability, from 0 to 1"),
        ("data: {max_text_length: 0}", "data.max_text_length is 0; it must be positive"),
        ("data: {skip_broken: -0.0}", "setting 'data.skip_broken' is -0.0; it must be true or false"),
    ],
)
def test_another_kind_of_value_is_refused_with_its_file_and_name(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'own.yaml'}: ")


def test_the_kinds_of_the_command_line_are_checked_too():
    with pytest.raises(UserError, match=r"Command line \(output=no\): setting 'output' is False, which is no text"):
        load_config(BASE, ["output=no"])


@pytest.mark.parametrize(
    ("text", "section", "name", "value"),
    [
        ("output: 2014", None, "output", "2014"),
        ("data: {skip_broken: 1}", "data", "skip_broken", True),
        ("data: {skip_broken: off}", "data", "skip_broken", False),
        ("data: {resize: null}", "data", "resize", None),
        ("encoder: {weights: '${data.root}'}", "encoder", "weights", "data/tiny_refcoco"),
    ],
)
def test_what_has_a_plain_meaning_stays(tmp_path: Path, text: str, section: str | None, name: str, value: object):
    config = load(tmp_path, text)
    assert getattr(getattr(config, section) if section else config, name) == value


def test_the_home_folder_is_meant_by_a_tilde_of_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(tmp_path, "output: ~/runs/mine").output == str(tmp_path / "runs" / "mine")


def test_and_by_one_of_the_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from detector.zoo import resolve_weights

    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_weights("~/my_run") == tmp_path / "my_run"
    with pytest.raises(UserError, match="file name too long"):
        resolve_weights("y" * 300)
