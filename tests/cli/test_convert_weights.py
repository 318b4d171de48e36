from __future__ import annotations

import pickle
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from detector.checkpoint import load_checkpoint, load_pretrained
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from e2e_vl.cli import convert_weights
from e2e_vl.data.answer_lists import read_answers
from e2e_vl.tasks.vqa import VQATask

TINY = "MODEL: {RESNETS: {DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8}, ROI_HEADS: {NUM_CLASSES: 5}}"


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    return convert_weights


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path / "tiny.yaml"


@pytest.fixture
def detector(config: Path) -> FasterRCNN:
    return FasterRCNN(DetectorConfig.from_yaml(config))


def write_pickle(detector: FasterRCNN, path: Path) -> Path:
    arrays = {name: value.numpy() for name, value in detector.state_dict().items()}
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "someone"}, protocol=2))
    return path


def test_into_a_folder_and_both_files(
    tool: types.ModuleType, config: Path, detector: FasterRCNN, tmp_path: Path, capsys: pytest.CaptureFixture
):
    source, state = write_pickle(detector, tmp_path / "a.pkl"), detector.state_dict()
    for name in ("out", "new/b.pth", "c.safetensors"):
        assert tool.main([str(source), "--config", str(config), "--output", str(tmp_path / name)]) == 0
        report = capsys.readouterr().out
        assert f"layout: Detectron2\nmatched: {len(state)}\nmissing: 0\nunexpected: 0\nmismatched: 0\n" in report
    assert load_pretrained(tmp_path / "out").config == detector.config
    files = (
        load_file(tmp_path / "out" / "model.safetensors"),
        torch.load(tmp_path / "new" / "b.pth", weights_only=True)["model"],
        load_file(tmp_path / "c.safetensors"),
    )
    for tensors in files:
        assert tensors.keys() == state.keys()
        assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_a_part_has_nothing_random_in_it(
    tool: types.ModuleType, config: Path, detector: FasterRCNN, tmp_path: Path, capsys: pytest.CaptureFixture
):
    trunk = {k: v for k, v in detector.state_dict().items() if k.startswith(("backbone.", "roi_heads.res5."))}
    torch.save({**trunk, "roi_heads.mask_head.weight": torch.zeros(1)}, tmp_path / "a.pth")
    arguments = [str(tmp_path / "a.pth"), "--config", str(config), "--output", str(tmp_path / "out")]
    assert tool.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "10 missing" in error and "a.pth" in error
    assert not (tmp_path / "out").exists()
    assert tool.main([*arguments, "--expect", "backbone"]) == 0
    report = capsys.readouterr().out
    assert "missing: 10\n  proposal_generator" in report and "unexpected: 1\n  roi_heads.mask_head.weight" in report
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == trunk.keys()
    load_checkpoint(FasterRCNN(DetectorConfig.from_yaml(config)), tmp_path / "out", expect="backbone")


@pytest.mark.parametrize(
    ("source", "config_text", "output", "word"),
    [
        ("none.pkl", TINY, "out", "none.pkl"),
        ("a.pkl", "MODEL: {RESNETS: {DEPPTH: 18}}", "out", "DEPPTH"),
        ("a.pkl", TINY.replace("5}", "6}"), "out", "mismatched"),
        ("a.pkl", TINY, "b.pkl", "b.pkl"),
        ("a.pkl", TINY, "tiny.yaml", "tiny.yaml"),
        ("bad.pkl", TINY, "out", "bad.pkl"),
    ],
)
def test_errors_are_one_line(
    tool: types.ModuleType,
    config: Path,
    detector: FasterRCNN,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    source: str,
    config_text: str,
    output: str,
    word: str,
):
    write_pickle(detector, tmp_path / "a.pkl")
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps({"w": np.load}))
    config.write_text(config_text)
    assert tool.main([str(tmp_path / source), "--config", str(config), "--output", str(tmp_path / output)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and word in message
    assert config.read_text() == config_text and not (tmp_path / "out").exists()


OFFICIAL = "<unk>\nt shirt\nt-shirt\nyes\nt/shirt\nu.s.\nus\nred, white\n"


def test_answers_that_are_spelled_alike_are_written_as_lines_that_are_read_back(tmp_path):
    """An official file may have several lines that its code reads as one answer; each keeps its class."""
    (tmp_path / "official.txt").write_text(OFFICIAL)
    answers = [VQATask.official_answer(line) for line in read_answers(tmp_path / "official.txt")]
    assert len(set(answers)) == len(answers) - 3
    lines = convert_weights.official_lines(answers, VQATask.official_answer)
    assert lines == ["<unk>", "t shirt", "t-shirt", "yes", "t shirt.", "us", "us.", "red white"]
    (tmp_path / "again.txt").write_text("".join(f"{line}\n" for line in lines))
    assert [VQATask.official_answer(line) for line in read_answers(tmp_path / "again.txt")] == answers


@pytest.mark.parametrize("answers", [["<unk>", "t - shirt"], ["no", "<unk>", "<unk>"], ["two\nlines"]])
def test_an_answer_that_a_file_cannot_hold_is_refused(answers):
    with pytest.raises(UserError, match=rf"Answer {len(answers) - 1} is .* task\.config\.answers"):
        convert_weights.official_lines(answers, VQATask.official_answer)
