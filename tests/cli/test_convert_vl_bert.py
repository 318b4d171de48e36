"""Official VL-BERT files to a model folder and back."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from detector.config import DetectorConfig
from e2e_vl.cli import convert_weights
from e2e_vl.config import RunConfig, save_config
from e2e_vl.run.build import build_model, build_tokenizer
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.weights.vl_bert import OfficialVLBert
from tests.weights.official_detector import OFFICIAL_DETECTOR
from tests.weights.starts import replaced

ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

save_official = OfficialVLBert().export


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    return convert_weights


@pytest.fixture
def settings(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> tuple[RunConfig, Path]:
    """A run of the official architecture, and its file."""
    config = replaced(tiny_config(), encoder={"config": ENCODER}, detector={"overrides": OFFICIAL_DETECTOR})
    build_tokenizer(config)
    config = replaced(config, data={"vocabulary": str(Path(config.output) / "tokenizer" / "vocab.txt")})
    save_config(config, tmp_path / "run.yaml")
    return config, tmp_path / "run.yaml"


def test_an_official_file_becomes_a_model_folder_and_comes_back_equal(tool, settings, tmp_path, capsys):
    config, run = settings
    tokenizer = build_tokenizer(config)
    torch.manual_seed(1)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_official(model, "refcoco", tmp_path / "official.model")

    folder, again = tmp_path / "folder", tmp_path / "again.model"
    assert tool.main([str(tmp_path / "official.model"), "--run", str(run), "seed=3", "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "official.model (VL-BERT names): " in printed
    assert f"written: {folder}" in printed
    read, loaded, _ = load_model(folder)
    assert read.seed == 3
    for part in (loaded.encoder, loaded.task, loaded.detector.backbone, loaded.detector.roi_heads.res5):
        name = next(name for name, module in loaded.named_modules() if module is part)
        theirs = model.get_submodule(name).state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in part.state_dict().items())

    assert tool.main([str(folder), "--output", str(again)]) == 0
    printed = capsys.readouterr().out
    assert "  detector.proposal_generator.rpn_head.conv.weight\n" in printed
    first, second = (torch.load(path, weights_only=True)["state_dict"] for path in (tmp_path / "official.model", again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def trained_vqa(config: RunConfig, answers: list[str], folder: Path) -> None:
    config = replaced(config, task={"name": "vqa", "config": {"answers": answers}})
    tokenizer = build_tokenizer(config)
    save_model(folder, config, build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer), tokenizer)


def test_answers_are_written_beside_a_model_of_vqa(tool, settings, tmp_path, capsys):
    config, _ = settings
    answers = ["yes", "<unk>", "2", "at night", "no"]
    trained_vqa(config, answers, tmp_path / "folder")
    assert tool.main([str(tmp_path / "folder"), "--output", str(tmp_path / "vqa.model")]) == 0
    written = tmp_path / "vqa.answers.txt"
    assert f"written: {written} (5 answers in the order of the classes" in capsys.readouterr().out
    task = {"name": "vqa", "config": {"answers": str(written)}, "weights": str(tmp_path / "vqa.model")}
    config = replaced(config, task=task)
    again = build_model(config, vocab_size=len(build_tokenizer(config)))
    assert again.task.answers == answers


@pytest.mark.parametrize("answer", ["", " ", "Yes", "no\nyes", "no\ryes", "yes!"])
def test_an_answer_that_official_files_cannot_hold(tool, settings, tmp_path, capsys, answer):
    trained_vqa(settings[0], ["no", answer], tmp_path / "folder")
    assert tool.main([str(tmp_path / "folder"), "--output", str(tmp_path / "vqa.model")]) == 2
    assert f"Answer 1 is {answer!r}, which an official answer vocabulary" in capsys.readouterr().err
    assert not list(tmp_path.glob("vqa*"))


def test_a_detector_that_the_official_code_does_not_have(settings, tmp_path):
    config, _ = settings
    model = build_model(config, vocab_size=20)
    other = {
        "INPUT.FORMAT": "RGB",
        "MODEL.PIXEL_MEAN": [1.0, 2.0, 3.0],
        "MODEL.PIXEL_STD": [58.0, 58.0, 58.0],
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.RESNETS.RES5_DILATION": 1,
        "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2",
        "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
        "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 0,
    }
    official = model.detector.config.to_flat()
    for key, value in other.items():
        model.detector.config = DetectorConfig.from_flat(official | {key: value})
        with pytest.raises(ValueError, match=rf"x\.model: the official code has {re.escape(key)} .*R_101\.yaml"):
            save_official(model, "refcoco", tmp_path / "x.model")
    model.detector.config = DetectorConfig.from_flat(
        official
        | {"MODEL.ROI_HEADS.NAME": "StandardROIHeads", "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead"}
        | {"MODEL.ROI_BOX_HEAD.NUM_FC": 1}
    )
    with pytest.raises(ValueError, match=r"has MODEL\.ROI_HEADS\.NAME Res5ROIHeads, this model StandardROIHeads"):
        save_official(model, "refcoco", tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.model", "--run", "run.yaml", "--output", "out"], "none.model: no such weights file"),
        (["run.yaml", "--run", "run.yaml", "--output", "out.pth"], "out.pth is not a folder"),
        (["run.yaml", "--run", "run.yaml", "--output", "out", "data.vocabulary=null"], "data.vocabulary is not set"),
        (["run.yaml", "--run", "run.yaml", "--output", "out"], "run.yaml: "),
        (["here", "--output", "out"], "What is here?"),
        (["here", "--output", "out.model"], "here holds no trained model"),
        (["here", "--output", "out.model", "seed=3"], "seed=3: settings are for --run"),
    ],
)
def test_errors_are_one_line(tool, settings, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert tool.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.glob("out*"))
