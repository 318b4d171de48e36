"""Conversion of VisualBERT to and from the official code and transformers, and initialization from BERT."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    VisualBertConfig,
    VisualBertForMultipleChoice,
    VisualBertForPreTraining,
    VisualBertForQuestionAnswering,
    VisualBertModel,
)

from detector.checkpoint import load_checkpoint
from detector.config import DetectorConfig
from detector.r2c import NetworkSizes, R2CNetwork
from detector.structures import PrecomputedDetector
from e2e_vl.encoders.visual_bert import PretrainedVisualBertConfig, VisualBertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.tasks.config import Flickr30KConfig, NLVR2Config, VCRConfig, VQAConfig
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.loading import load_encoder, load_task
from e2e_vl.weights.visual_bert import OfficialVisualBert, TransformersVisualBert, to_official
from tests.weights.starts import BERT_SIZES as SIZES
from tests.weights.starts import fill, pretraining_task, same
from tests.weights.starts import rules as rules_of

NETWORK = {"R2C.FEATURE_DIM": 8, "R2C.MASK_CHANNELS": 4, "R2C.CLASS_DIM": 3, "ROI_HEADS.NUM_CLASSES": 5}
NETWORK |= {"RESNETS.NORM": "BN", "BACKBONE.FREEZE_AT": 0, "ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign"}
NETWORK |= {"ROI_BOX_HEAD.POOLER_RESOLUTION": 7, "PIXEL_MEAN": [123.675, 116.28, 103.53]}
NETWORK |= {"PIXEL_STD": [58.395, 57.12, 57.375]}
HEADS = {"masked_words": 1.0, "relationship": 1.0, "masked_regions": 0.0, "masked_text": 0.0}
rules = partial(rules_of, encoder="visual_bert")
export_official, export_folder = OfficialVisualBert().export, TransformersVisualBert().export


def make_encoder(**fields: Any) -> VisualBertEncoder:
    return VisualBertEncoder(PretrainedVisualBertConfig(**{**SIZES, "feature_dim": 8, **fields}))


def answers_task(count: int) -> VQATask:
    answers = [str(number) for number in range(count)]
    return VQATask(16, VQAConfig(answers=answers, hidden_layer=False, init_from_words=False))


MAKE_TASK = {
    "pretraining": lambda: pretraining_task(16, 40, HEADS),
    "vqa": lambda: answers_task(7),
    "vcr": lambda: VCRTask(16, VCRConfig(region_loss_weight=0)),
    "nlvr2": lambda: NLVR2Task(16, NLVR2Config()),
    "flickr30k": lambda: Flickr30KTask(16, Flickr30KConfig(head_size=8)),
    "refcoco": lambda: ReferringTask(16),
}


def make_model(task: str | nn.Module, seed: int = 1, **fields: Any) -> VisionLanguageModel:
    task = MAKE_TASK[task]() if isinstance(task, str) else task
    return fill(VisionLanguageModel(PrecomputedDetector(DetectorConfig()), make_encoder(**fields), task), seed)


def state_of(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)


# Official files


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["pretraining", "vqa", "vcr", "nlvr2", "flickr30k"])
def test_there_and_back_is_exact(tmp_path, name, late):
    model, other = (make_model(name, seed, bypass_transformer=late) for seed in (1, 2))
    path = tmp_path / "x.th"
    assert export_official(model, name, path) == []
    state = state_of(path)
    assert all(key.startswith("bert.") for key in state)
    assert any("additional_layer" in key for key in state) == late
    report = load_encoder(other.encoder, path, rules(name))
    assert report.is_complete and report.layout == "VisualBERT"
    assert load_task(other.task, path, rules(name)).is_complete
    assert same(other, model)
    parts = OfficialVisualBert().convert(state, path)
    assert parts.task_name == name
    assert same(to_official(parts)[0], state)


@pytest.mark.parametrize("count", [1, 2])
def test_a_head_of_one_or_two_answers_is_one_of_questions_where_a_run_of_questions_asks(tmp_path, count):
    model, other, path = make_model(answers_task(count)), answers_task(count), tmp_path / "x.th"
    export_official(model, "vqa", path)
    assert load_task(other, path, rules("vqa")).is_complete
    assert same(other, model.task)
    with pytest.raises(ValueError, match=r"x.th: .*flickr30k"):
        load_task(MAKE_TASK["flickr30k"](), path, rules("flickr30k"))


def small_network(seed: int, **settings: Any) -> R2CNetwork:
    """With numbers of its own everywhere, counters of batches included."""
    flat = {f"MODEL.{key}": value for key, value in {**NETWORK, **settings}.items()} | {"INPUT.FORMAT": "RGB"}
    torch.manual_seed(seed)
    network = R2CNetwork(DetectorConfig.from_flat(flat), NetworkSizes(4, (1, 1, 1, 1), (2, 4, 4, 8)))
    for value in network.state_dict().values():
        value.copy_(torch.randint(1, 9, value.shape))
    return network


def test_a_file_of_vcr_has_its_network_of_regions(tmp_path):
    model, path = make_model("vcr"), tmp_path / "x.th"
    model.detector = small_network(1)
    assert export_official(model, "vcr", path) == []
    state = state_of(path)
    assert sum(name.startswith("detector.") for name in state) == len(model.detector.state_dict())
    assert load_encoder(make_encoder(), path, rules("vcr")).is_complete
    other = small_network(2)
    report = load_checkpoint(other, path)
    assert report.is_complete and report.layout == "VisualBERT"
    assert same(other, model.detector)


def test_pre_training_keeps_its_segments_and_heads_that_nothing_reads_are_left_out(tmp_path):
    """Both segments were trained, other than in VL-BERT's pre-training."""
    path, task = tmp_path / "x.th", pretraining_task(16, 40, {"masked_words": 1.0, "masked_regions": 1.0})
    left_out = export_official(make_model(task), "pretraining", path)
    assert left_out and all(name.startswith("task.masked_regions.") for name in left_out)
    state = state_of(path)
    assert "bert.cls.predictions.bias" in state and "bert.cls.seq_relationship.bias" not in state
    encoder = make_encoder()
    report = load_encoder(encoder, path, rules("vcr"))
    assert report.is_complete and report.copied == []
    segments = state["bert.bert.embeddings.token_type_embeddings.weight"]
    assert torch.equal(encoder.embeddings.token_type_embeddings.weight, segments)
    state |= {f"bert.flickr_attention.{one}.bias": torch.rand(8) for one in ("query", "key", "value")}
    parts = OfficialVisualBert().convert(state, "x.th")
    assert parts.task_name == "flickr30k" and {"query.bias", "key.bias"} <= parts.task.keys()
    assert "value.bias" not in parts.task


@pytest.mark.parametrize(
    ("export", "task", "fields", "network", "wrong"),
    [
        (export_official, "vqa", {"region_position": "paper"}, {}, "x.th: .*region_position"),
        (export_official, "vqa", {"region_types": [1]}, {}, r"x.th: .*region_types = \[0, 1\]"),
        (export_official, "vqa", {"project_equal_sizes": False}, {}, "x.th: .*project_equal_sizes"),
        (export_official, "vqa", {"relative_geometry": True}, {}, "x.th: .*relative_geometry"),
        (export_official, "refcoco", {}, {}, "refcoco"),
        (export_official, "vcr", {}, {"ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2"}, "x.th: .*POOLER_TYPE"),
        (export_folder, "vcr", {"bypass_transformer": True}, {}, "x.th: .*bypass_transformer"),
    ],
)
def test_what_the_other_project_would_compute_otherwise_is_not_written(tmp_path, export, task, fields, network, wrong):
    model = make_model(task, **fields)
    if network:
        model.detector = small_network(1, **network)
    with pytest.raises(ValueError, match=wrong):
        export(model, task, tmp_path / "x.th")
    assert not list(tmp_path.iterdir())


# transformers


ARCHITECTURES = {
    "pretraining": VisualBertForPreTraining,
    "vqa": VisualBertForQuestionAnswering,
    "vcr": VisualBertForMultipleChoice,
    "refcoco": VisualBertModel,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_reads_a_folder_and_so_do_we(tmp_path, name):
    """A task without a head there leaves the trunk, with our names."""
    model, other = (make_model(name, seed) for seed in (1, 2))
    left_out = export_folder(model, name, tmp_path / "model.safetensors")
    # as `from_pretrained`, and nothing is missing or left over
    theirs, found = ARCHITECTURES[name].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(theirs if name == "refcoco" else theirs.visual_bert, model.encoder)
    assert theirs.config.pad_token_id is None and theirs.config.visual_embedding_dim == 8
    if name == "refcoco":
        assert left_out == [f"task.{key}" for key in model.task.state_dict()]
    elif name == "pretraining":
        assert torch.equal(theirs.cls.predictions.decoder.weight, model.encoder.embeddings.word_embeddings.weight)
        assert torch.equal(theirs.cls.predictions.decoder.bias, model.task.word_head.bias)
        assert torch.equal(theirs.cls.seq_relationship.weight, model.task.relationship.head.weight)
    else:
        assert torch.equal(theirs.cls.weight, model.task.head.output.weight)
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        report = load_encoder(other.encoder, folder, rules(name))
        assert report.is_complete
        assert report.layout == ("this project" if name == "refcoco" else "transformers' VisualBERT")
        assert same(other.encoder, model.encoder)
        if name != "refcoco":
            assert left_out == [] and load_task(other.task, folder, rules(name)).is_complete
            assert same(other.task, model.task)
    with pytest.raises(ValueError, match=r"config.json: num_attention_heads"):
        load_encoder(make_encoder(num_attention_heads=4), tmp_path, rules(name))


def test_files_of_old_versions_hold_indices_and_the_bias_twice(tmp_path):
    torch.manual_seed(1)
    config = VisualBertConfig(**SIZES, visual_embedding_dim=8)
    state = dict(VisualBertForPreTraining(config).state_dict())
    state["visual_bert.embeddings.position_ids"] = torch.arange(20)[None]
    assert {"cls.predictions.bias", "cls.predictions.decoder.bias"} <= state.keys()
    torch.save(state, tmp_path / "pytorch_model.bin")
    task = MAKE_TASK["pretraining"]()
    assert load_encoder(make_encoder(), tmp_path, rules("pretraining")).is_complete
    assert load_task(task, tmp_path, rules("pretraining")).is_complete
    assert torch.equal(task.word_head.bias, state["cls.predictions.bias"])
    trunk = {name.removeprefix("visual_bert."): value for name, value in state.items() if name.startswith("visual_b")}
    torch.save(trunk, tmp_path / "pytorch_model.bin")
    assert load_encoder(make_encoder(), tmp_path, rules("pretraining")).is_complete


# BERT


@pytest.mark.parametrize(("copied", "late"), [(True, False), (False, True)])
def test_encoder_and_heads_start_from_bert(tmp_path, copied, late):
    bert = fill(BertForPreTraining(BertConfig(**SIZES)), 3)
    bert.save_pretrained(tmp_path)
    encoder = make_encoder(special_visual_initialize=copied, bypass_transformer=late)
    own = {name: value.clone() for name, value in encoder.state_dict().items()}
    report = load_encoder(encoder, tmp_path, rules("pretraining"))
    state, theirs = encoder.state_dict(), bert.bert.state_dict()
    assert all(torch.equal(state[name], value) for name, value in theirs.items())
    tables = {
        "embeddings.visual_token_type_embeddings.weight": "embeddings.token_type_embeddings.weight",
        "embeddings.visual_position_embeddings.weight": "embeddings.position_embeddings.weight",
    }
    assert len(report.copied) == 2 * copied
    for visual, text in tables.items():
        assert torch.equal(state[visual], theirs[text] if copied else own[visual])
        assert state[visual].data_ptr() != state[text].data_ptr()
    new = ("embeddings.visual_projection.", "additional_layer.", *(() if copied else tables))
    assert set(report.missing) == {name for name in own if name.startswith(new)}

    task = MAKE_TASK["pretraining"]()
    report = load_task(task, tmp_path, rules("pretraining"))
    assert report.copied == ["word_head -> word_head", "relationship -> relationship"] and not report.missing
    assert torch.equal(task.word_head.transform["dense"].weight, bert.cls.predictions.transform.dense.weight)
    assert torch.equal(task.word_head.bias, bert.cls.predictions.bias)
    assert same(task.relationship.head, bert.cls.seq_relationship)  # as it is, although 1 = fits
