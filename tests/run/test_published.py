"""A published checkpoint answers a question as the run does that it was written from."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import torch

import e2e_vl
from detector.errors import UserError
from e2e_vl.cli import convert
from e2e_vl.config_files import load_config, save_config
from e2e_vl.run.build import ADAPTERS, build_model
from e2e_vl.run.checkpoint import save_model
from e2e_vl.text import load_tokenizer
from tests.conftest import ENCODERS
from tests.run.runs import predictions_of
from tests.weights.starts import OFFICIAL_DETECTOR, replaced

pytestmark = pytest.mark.usefixtures("on_cpu")
LXMERT_HEAD = {"head_width": 2, "dropout": 0.0, "init_from_words": False}
VISUAL_BERT_HEAD = {"hidden_layer": False, "init_from_words": False}
CASES = {
    "LXMERT": ("lxmert", "published.pth", LXMERT_HEAD),
    "LxmertForQuestionAnswering": ("lxmert", "folder/model.safetensors", LXMERT_HEAD),
    "VisualBERT": ("visual_bert", "published.th", VISUAL_BERT_HEAD),
    "VisualBertForQuestionAnswering": ("visual_bert", "folder/model.safetensors", VISUAL_BERT_HEAD),
    "VL-BERT": ("vl_bert", "published.model", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_three_lines_ask_a_published_checkpoint(case, vqa_run, tmp_path):
    encoder, name, head = CASES[case]
    run = vqa_run / "model"
    tokenizer = run / "tokenizer"
    config = load_config(run / "config.yaml")
    answers = ["yes", "no", "red", "at night"]
    config = replaced(config, task={"name": "vqa", "config": {"answers": answers, **head}, "weights": None})
    if ENCODERS[encoder] is not None:
        config = replaced(config, encoder={**ENCODERS[encoder], "weights": None})
    if encoder == "vl_bert":  # the official format has these choices
        official = {"image_feature_on_words": True, "norm_first": False}
        sections = dict(config.detector.overrides["MODEL"])
        for section, values in OFFICIAL_DETECTOR["MODEL"].items():
            if isinstance(values, dict):
                values = {**sections.get(section, {}), **values}
            sections[section] = values
        overrides = {**config.detector.overrides, "MODEL": sections}
        config = replaced(
            config,
            detector={"overrides": overrides},
            encoder={"config": msgspec.to_builtins(config.encoder.config) | official},
        )
    torch.manual_seed(1)
    words = load_tokenizer(tokenizer)
    save_model(tmp_path / "run", config, build_model(config, vocab_size=len(words), tokenizer=words), words)
    convert.main([str(tmp_path / "run"), "--output", str(tmp_path / name)])
    empty = msgspec.structs.replace(config.task.config, answers=None)
    config = replaced(config, task={"name": "vqa", "config": msgspec.to_builtins(empty), "weights": None})
    save_config(config, tmp_path / "published.yaml")
    source = tmp_path / name
    if name.startswith("folder"):
        source = source.parent
    list_of_answers = (tmp_path / name).with_suffix(".answers.txt")
    detector = tmp_path / "run" / "detector"

    model = e2e_vl.load(
        source,
        "cpu",
        config=tmp_path / "published.yaml",
        answers=list_of_answers,
        detector=detector,
        tokenizer=tokenizer,
    )
    image = predictions_of(vqa_run)[0]["file_name"]
    answer = model(image, "what is red ?")
    expected = e2e_vl.load(tmp_path / "run", "cpu")(image, "what is red ?")
    assert answer.text == expected.text in answers
    assert answer.score == pytest.approx(expected.score, abs=1e-6)

    with pytest.raises(UserError, match="give answers=FILE"):
        e2e_vl.load(source, "cpu", config=tmp_path / "published.yaml")


def test_the_configs_of_published_files_exist():
    configs = {}
    for adapters in ADAPTERS.values():
        for adapter in adapters:
            configs |= dict.fromkeys(adapter.question_configs.values(), adapter)
    assert len(configs) == 6
    for name in configs:
        assert load_config(name, ["data.root=."]).detector.backend != "precomputed"


def test_options_of_published_files_are_refused_for_a_run(vqa_run):
    with pytest.raises(UserError, match="has its own answers"):
        e2e_vl.load(vqa_run, answers=["yes"])


def test_a_file_that_is_no_whole_model_is_refused(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="no whole model of LXMERT, VisualBERT or VL-BERT"):
        e2e_vl.load(tmp_path / "other.pth")
    assert Path(tmp_path / "other.pth").is_file()
