"""Published weights of detectors and official models of whole encoders, converted in both directions."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from detector.checkpoint import load_checkpoint
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from e2e_vl.cli import convert as tool
from e2e_vl.config import RunConfig
from e2e_vl.config_files import save_config
from e2e_vl.data.answer_lists import read_answers
from e2e_vl.run.build import build_model, build_tokenizer
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.tasks.vqa import VQAVocabulary
from e2e_vl.weights.vl_bert import OfficialVLBert
from tests.cli.calls import refused
from tests.detector.published import load_detector
from tests.weights.starts import OFFICIAL_DETECTOR, replaced, same

TINY = "MODEL: {RESNETS: {DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8}, ROI_HEADS: {NUM_CLASSES: 5}}"
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

save_official = OfficialVLBert().export


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path / "tiny.yaml"


@pytest.fixture
def detector(config: Path) -> FasterRCNN:
    return FasterRCNN(DetectorConfig.from_yaml(config))


def test_into_a_folder_and_both_files(config: Path, detector: FasterRCNN, tmp_path: Path, capsys):
    source, state = tmp_path / "a.pkl", detector.state_dict()
    content = {"model": {name: value.numpy() for name, value in state.items()}, "__author__": "someone"}
    source.write_bytes(pickle.dumps(content, protocol=2))
    for name in ("out", "new/b.pth", "c.safetensors"):
        assert tool.main([str(source), "--config", str(config), "--output", str(tmp_path / name)]) == 0
        report = capsys.readouterr().out
        assert f"layout: Detectron2\nmatched: {len(state)}\nmissing: 0\nunexpected: 0\nmismatched: 0\n" in report
    assert load_detector(tmp_path / "out").config == detector.config
    files = (
        load_file(tmp_path / "out" / "model.safetensors"),
        torch.load(tmp_path / "new" / "b.pth", weights_only=True)["model"],
        load_file(tmp_path / "c.safetensors"),
    )
    assert all(same(tensors, state) for tensors in files)


def test_a_part_has_nothing_random_in_it(config: Path, detector: FasterRCNN, tmp_path: Path, capsys):
    trunk = {k: v for k, v in detector.state_dict().items() if k.startswith(("backbone.", "roi_heads.res5."))}
    torch.save({**trunk, "roi_heads.mask_head.weight": torch.zeros(1)}, tmp_path / "a.pth")
    arguments = [str(tmp_path / "a.pth"), "--config", str(config), "--output", str(tmp_path / "out")]
    error = refused(["convert", *arguments], capsys)
    assert "10 missing" in error and "a.pth" in error
    assert not (tmp_path / "out").exists()
    assert tool.main([*arguments, "--expect", "backbone"]) == 0
    report = capsys.readouterr().out
    assert "missing: 10\n  proposal_generator" in report and "unexpected: 1\n  roi_heads.mask_head.weight" in report
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == trunk.keys()
    load_checkpoint(FasterRCNN(DetectorConfig.from_yaml(config)), tmp_path / "out", expect="backbone")


# Official models of a whole encoder


@pytest.fixture
def settings(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> tuple[RunConfig, Path]:
    """A run of the official architecture, and its file."""
    config = replaced(tiny_config(), encoder={"config": ENCODER}, detector={"overrides": OFFICIAL_DETECTOR})
    build_tokenizer(config)
    config = replaced(config, data={"vocabulary": str(Path(config.output) / "tokenizer" / "vocab.txt")})
    save_config(config, tmp_path / "run.yaml")
    return config, tmp_path / "run.yaml"


def test_an_official_file_becomes_a_model_folder_and_comes_back_equal(settings, tmp_path, capsys):
    config, run = settings
    tokenizer = build_tokenizer(config)
    torch.manual_seed(1)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_official(model, "refcoco", tmp_path / "official.model")

    folder, again = tmp_path / "folder", tmp_path / "again.model"
    assert tool.main([str(tmp_path / "official.model"), "--run", str(run), "seed=3", "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "official.model (VL-BERT names): " in printed and f"written: {folder}" in printed
    read, loaded, _ = load_model(folder)
    assert read.seed == 3
    for name in ("encoder", "task", "detector.backbone", "detector.roi_heads.res5"):
        assert same(loaded.get_submodule(name), model.get_submodule(name))

    assert tool.main([str(folder), "--output", str(again)]) == 0
    assert "  detector.proposal_generator.rpn_head.conv.weight\n" in capsys.readouterr().out
    first, second = (torch.load(path, weights_only=True)["state_dict"] for path in (tmp_path / "official.model", again))
    assert same(first, second)


def test_answers_are_written_beside_a_model_of_vqa(settings, tmp_path, capsys):
    answers = ["yes", "<unk>", "2", "at night", "no"]
    config = replaced(settings[0], task={"name": "vqa", "config": {"answers": answers}})
    tokenizer = build_tokenizer(config)
    save_model(tmp_path / "folder", config, build_model(config, vocab_size=len(tokenizer)), tokenizer)
    assert tool.main([str(tmp_path / "folder"), "--output", str(tmp_path / "vqa.model")]) == 0
    written = tmp_path / "vqa.answers.txt"
    assert f"written: {written} (5 answers in the order of the classes" in capsys.readouterr().out
    task = {"name": "vqa", "config": {"answers": str(written)}, "weights": str(tmp_path / "vqa.model")}
    config = replaced(config, task=task)
    assert build_model(config, vocab_size=len(tokenizer)).task.answers == answers


def test_answers_that_are_spelled_alike_are_written_as_lines_that_are_read_back(tmp_path):
    """An official file may have several lines that its code reads as one answer; each keeps its class."""
    (tmp_path / "official.txt").write_text("<unk>\nt shirt\nt-shirt\nyes\nt/shirt\nu.s.\nus\nred, white\n")
    answers = [VQAVocabulary.parse_official_answer(line) for line in read_answers(tmp_path / "official.txt")]
    assert len(set(answers)) == len(answers) - 3
    lines = tool.vocabulary_lines(answers, VQAVocabulary.parse_official_answer)
    assert lines == ["<unk>", "t shirt", "t-shirt", "yes", "t shirt.", "us", "us.", "red white"]
    (tmp_path / "again.txt").write_text("".join(f"{line}\n" for line in lines))
    assert [VQAVocabulary.parse_official_answer(line) for line in read_answers(tmp_path / "again.txt")] == answers
    for answers in (["<unk>", "t - shirt"], ["no", "<unk>", "<unk>"], ["two\nlines"]):
        with pytest.raises(UserError, match=rf"Answer {len(answers) - 1} is .* task\.config\.answers"):
            tool.vocabulary_lines(answers, VQAVocabulary.parse_official_answer)


@pytest.mark.parametrize(
    "change",
    [
        {"INPUT.FORMAT": "RGB"},
        {"MODEL.PIXEL_MEAN": [1.0, 2.0, 3.0]},
        {"MODEL.PIXEL_STD": [58.0, 58.0, 58.0]},
        {"MODEL.RESNETS.STRIDE_IN_1X1": False},
        {"MODEL.RESNETS.RES5_DILATION": 1},
        {"MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2"},
        {"MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7},
        {"MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 0},
        {
            "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
            "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead",
            "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
        },
    ],
)
def test_a_detector_that_the_official_code_does_not_have(settings, tmp_path, change):
    model = build_model(settings[0], vocab_size=20)
    model.detector.config = DetectorConfig.from_flat(model.detector.config.to_flat() | change)
    with pytest.raises(ValueError, match=rf"x\.model: .*{re.escape(next(iter(change)))}"):
        save_official(model, "refcoco", tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


def test_what_is_not_there_is_named(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "none.model" in refused(["convert", "none.model", "--run", "run.yaml", "--output", "out"], capsys)
    assert "here does not exist" in refused(["convert", "here", "--output", "out.model"], capsys)
    assert not list(tmp_path.glob("out*"))
