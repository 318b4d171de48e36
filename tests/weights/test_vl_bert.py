"""Conversion of VL-BERT to and from the official code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from detector.checkpoint import load_checkpoint
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.structures import PrecomputedDetector
from detector.yaml_tree import flatten
from e2e_vl.encoders.vl_bert import PretrainedVLBertConfig, VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.tasks.config import VCRConfig, VQAConfig
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.base import ModelWeights
from e2e_vl.weights.loading import load_encoder, load_task
from e2e_vl.weights.vl_bert import OfficialVLBert, to_official
from tests.weights.starts import BERT_SIZES, OFFICIAL_DETECTOR, pretraining_task, rules, same

ROOT = Path(__file__).parents[2]
TINY_DETECTOR = {"MODEL.RESNETS.DEPTH": 50, "MODEL.RESNETS.STEM_OUT_CHANNELS": 4, "MODEL.RESNETS.WIDTH_PER_GROUP": 4}
TINY_DETECTOR |= {"MODEL.RESNETS.RES2_OUT_CHANNELS": 8, "MODEL.RESNETS.NORM": "BN", "MODEL.ROI_HEADS.NUM_CLASSES": 4}
TINY_ENCODER = {**BERT_SIZES, "geometry_dim": 16}
PRETRAINING = {"text_only_embedding": True, "masked_region_embedding": True}
DEPTHS = {6: 50, 23: 101, 36: 152}  # blocks of layer3 -> depth
save_official = OfficialVLBert().export
KINDS = ("pretraining", "pretraining_rel", "pretraining_prec", "refcoco", "vqa", "vcr")
NOT_OFFICIAL = ("detector.proposal_generator.", "detector.roi_heads.box_predictor.")
ONLY_PRETRAINING = [f"embeddings.{name}.weight" for name in ("masked_region_word_embedding", "text_only_embedding")]


def make_parts(kind: str, detector: DetectorConfig, encoder: dict, classes: int, answers: int) -> tuple[nn.Module, ...]:
    name = kind.split("_")[0]
    config = PretrainedVLBertConfig(
        **encoder,
        **(PRETRAINING if name == "pretraining" else {}),
        masked_region_feature=kind == "pretraining_prec",
        with_pooler=kind in ("pretraining_rel", "vcr"),
    )
    hidden = config.hidden_size
    if name == "pretraining":
        objectives = {"masked_regions": {"classes": classes}, "relationship": float(kind == "pretraining_rel")}
        task = pretraining_task(hidden, config.vocab_size, objectives)
    elif name == "vqa":
        task = VQATask(hidden, VQAConfig(answers=[str(number) for number in range(answers)]))
    else:
        task = {"refcoco": ReferringTask, "vcr": VCRTask}[name](hidden)
    make_detector = PrecomputedDetector if kind in ("pretraining_prec", "vqa") else FasterRCNN
    return make_detector(detector), VLBertModel(config), task


def tiny_model(kind: str, seed: int) -> VisionLanguageModel:
    torch.manual_seed(seed)
    detector = DetectorConfig.from_flat(flatten(OFFICIAL_DETECTOR) | TINY_DETECTOR)
    feature_dim = 8 * TINY_DETECTOR["MODEL.RESNETS.RES2_OUT_CHANNELS"]
    parts = make_parts(kind, detector, {**TINY_ENCODER, "feature_dim": feature_dim}, classes=5, answers=7)
    model = VisionLanguageModel(*parts)
    for tensor in model.state_dict().values():  # also those that start at 0 or 1
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.1)
        else:
            tensor.fill_(seed)
    return model


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def load_all(model: VisionLanguageModel, path: Path, task_name: str) -> None:
    if model.detector.state_dict():
        load_checkpoint(model.detector, path, expect="backbone")
    load_encoder(model.encoder, path, rules(task_name))
    load_task(model.task, path, rules(task_name))


def official_layout(kind: str, golden_root: Path) -> dict[str, list[int]]:
    """Names, without `module.`, and shapes of the full-size model."""
    recorded = json.loads((golden_root / "vl_bert" / "official_state_keys.json").read_text())
    if kind in ("pretraining", "pretraining_prec"):
        return recorded["pretrain_base_e2e" if kind == "pretraining" else "pretrain_base_prec"]
    changes = recorded["downstream"][{"refcoco": "refcoco_base", "vqa": "vqa_base", "vcr": "vcr_q2a_base"}[kind]]
    keys = dict(recorded["pretrain_base_e2e"])
    for name in changes["pretrain_base_e2e_keys_absent"]:
        del keys[name]
    keys |= changes["keys_not_in_pretrain_base_e2e"]
    if kind == "vcr":  # the file lists only the pooler with the prefix that all of `vlbert.` has there
        keys = {re.sub(r"^vlbert\.(?!_module)", "vlbert._module.", name): shape for name, shape in keys.items()}
    return keys


@pytest.mark.parametrize("kind", ["pretraining", "pretraining_prec", "refcoco", "vqa", "vcr"])
def test_names_and_shapes_of_the_full_size_model_are_the_official_ones(kind, golden_root):
    layout = official_layout(kind, golden_root)
    largest = official_layout("pretraining", golden_root)
    words, hidden = largest["vlbert.word_embeddings.weight"]
    encoder = {
        "vocab_size": words,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "num_hidden_layers": len({name.split(".")[3] for name in largest if name.startswith("vlbert.encoder.layer.")}),
        "intermediate_size": largest["vlbert.encoder.layer.0.intermediate.dense.bias"][0],
        "max_position_embeddings": largest["vlbert.position_embeddings.weight"][0],
        "feature_dim": largest["image_feature_extractor.roi_head_feature_extractor.0.bn3.bias"][0],
    }
    depth = DEPTHS[len({name.split(".")[3] for name in largest if ".layer3." in name})]
    base = str(ROOT / "configs" / "detector" / "vl_bert_R_101.yaml")
    detector = DetectorConfig.from_yaml({"_BASE_": base, "MODEL": {"RESNETS": {"DEPTH": depth}}})
    classes = largest["vlbert.mvrc_head.region_cls_pred.bias"][0]
    answers = layout["final_mlp.2.bias"][0] if kind == "vqa" else 0
    with torch.device("meta"):  # shapes without memory
        parts = make_parts(kind, detector, encoder, classes, answers)
    states = (part.state_dict() for part in parts)
    official, left_out = to_official(ModelWeights(*states, task_name=kind.split("_")[0]))
    shapes = {name: list(value.shape) for name, value in official.items()}
    assert shapes == {f"module.{name}": shape for name, shape in layout.items()}
    expected = () if kind in ("pretraining_prec", "vqa") else NOT_OFFICIAL
    assert {name for name in left_out if not name.startswith(expected)} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_exact(kind, tmp_path):
    name = kind.split("_")[0]
    model, other, path = tiny_model(kind, seed=1), tiny_model(kind, seed=2), tmp_path / "x.model"
    left_out = save_official(model, name, path)
    load_all(other, path, name)
    ours = other.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, ours[key]) == (key not in left_out), key
    assert all(key.startswith(NOT_OFFICIAL) for key in left_out if not key.endswith("num_batches_tracked"))
    save_official(other, name, tmp_path / "y.model")
    assert same(state_of(path), state_of(tmp_path / "y.model"))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({"background": "last"}, {"background": "first"}), ({"teacher": "file"}, {"background": "last"})],
)
def test_region_classes_of_a_file_begin_with_the_background(tmp_path, saved, loaded):
    """Official region classifiers have it there, whatever the order of the run is."""
    model, path = tiny_model("pretraining", 1), tmp_path / "x.model"
    source, target = model.task, tiny_model("pretraining", 2).task
    source.config = msgspec.structs.replace(source.config, **saved)
    target.config = msgspec.structs.replace(target.config, **loaded)
    save_official(model, "pretraining", path)
    report = load_task(target, path, rules("pretraining"))
    is_last = saved.get("background") == "last"
    for name, ours in source.masked_regions.output.named_parameters():
        written = state_of(path)[f"module.vlbert.mvrc_head.region_cls_pred.{name}"]
        assert torch.equal(written, torch.cat([ours[-1:], ours[:-1]]) if is_last else ours)
        read = getattr(target.masked_regions.output, name)
        assert torch.equal(read, written if is_last else torch.cat([written[1:], written[:1]]))
    assert len(report.copied) == (not is_last)
    assert torch.equal(target.word_head.bias, source.word_head.bias)


def test_img_is_written_for_regions_and_for_masked_regions(tmp_path):
    """So the official model computes the same; read again, one of the two is left over."""
    model = tiny_model("pretraining", 1)
    fields = model.encoder.config.to_dict() | {"region_word": "img", "masked_region_embedding": False}
    model.encoder = VLBertModel(PretrainedVLBertConfig(**fields))
    save_official(model, "pretraining", tmp_path / "x.model")
    state = state_of(tmp_path / "x.model")
    for name in ("object_linguistic_embeddings", "object_mask_word_embedding"):
        assert torch.equal(state[f"module.{name}.weight"], model.encoder.embeddings.region_word_embedding.weight)
    again = VLBertModel(PretrainedVLBertConfig(**fields))
    report = load_encoder(again, tmp_path / "x.model", rules("pretraining"))
    assert report.unexpected == ["embeddings.masked_region_word_embedding.weight"] and not report.missing
    assert same(again, model.encoder)


def test_half_precision_and_files_without_the_prefix(tmp_path):
    model, other, path = tiny_model("refcoco", seed=1), tiny_model("refcoco", seed=2), tmp_path / "half.model"
    save_official(model, "refcoco", path)
    state = {key.removeprefix("module."): value for key, value in state_of(path).items()}
    half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    torch.save({"state_dict": half, "optimizer": {"lr": 0.1}, "validation_monitor": {"best_epoch": 3}}, path)
    load_all(other, path, "refcoco")
    for key in ("detector.backbone.stem.conv1.weight", "encoder.embeddings.norm.bias", "task.head.output.weight"):
        value = other.state_dict()[key]
        assert value.dtype == torch.float32 and torch.equal(value, model.state_dict()[key].half().float())


def test_pre_training_starts_refcoco_and_vqa(tmp_path):
    source, target, path = tiny_model("pretraining", 1), tiny_model("refcoco", 2), tmp_path / "x.model"
    output = target.task.head.output.weight.clone()
    save_official(source, "pretraining", path)
    report = load_encoder(target.encoder, path, rules("refcoco"))
    assert report.unexpected == ONLY_PRETRAINING
    report = load_task(target.task, path, rules("refcoco"))
    assert report.copied == ["masked_regions.transform -> head.transform"]
    assert report.missing == ["head.output.weight", "head.output.bias"]
    assert {name.split(".")[0] for name in report.unexpected} == {"word_head", "masked_regions"}
    assert same(target.task.head.transform["dense"], source.task.masked_regions.transform["dense"])
    assert torch.equal(target.task.head.output.weight, output)
    source, target = tiny_model("pretraining_prec", 1), tiny_model("vqa", 2)
    save_official(source, "pretraining", path)
    load_task(target.task, path, rules("vqa"))  # from the head over words
    assert same(target.task.head.transform, source.task.word_head.transform)


@pytest.mark.parametrize("kind", ["pretraining", "pretraining_rel"])
def test_pre_training_starts_vcr(tmp_path, kind):
    source, target, path = tiny_model(kind, 1), tiny_model("vcr", 2), tmp_path / "x.model"
    own = {key: value.clone() for key, value in target.state_dict().items()}
    save_official(source, "pretraining", path)
    report = load_encoder(target.encoder, path, rules("vcr"))
    theirs = source.encoder.embeddings.segment_embeddings.weight
    assert torch.equal(target.encoder.embeddings.segment_embeddings.weight, theirs[[0, 0, 2]])
    assert report.copied == ["embeddings.segment_embeddings.weight row 0 -> row 1"]
    has_pooler = kind == "pretraining_rel"
    assert report.missing == ([] if has_pooler else ["pooler.dense.weight", "pooler.dense.bias"])
    report, task = load_task(target.task, path, rules("vcr")), target.task
    transform = source.task.masked_regions.transform["dense"].weight
    assert torch.equal(task.region_classifier.transform["dense"].weight, transform)
    assert torch.equal(task.region_classifier.output.weight, own["task.region_classifier.output.weight"])
    if has_pooler:
        rows = source.task.relationship.head
        assert torch.equal(task.head.output.weight, rows.weight[1:] - rows.weight[:1])
        assert torch.equal(task.head.output.bias, rows.bias[1:] - rows.bias[:1])
    else:
        assert torch.equal(task.head.output.weight, own["task.head.output.weight"])
        assert "head.output.weight" in report.missing
    target.encoder.embeddings.segment_embeddings.weight.data[1] += 1  # a fine-tuned model keeps its segments
    save_official(target, "vcr", path)
    again = tiny_model("vcr", 3).encoder
    assert load_encoder(again, path, rules("vcr")).copied == [] and same(again, target.encoder)


def test_what_only_pre_training_trains_may_be_missing_from_a_fine_tuned_model(tmp_path):
    fine_tuned, pretrained = tiny_model("refcoco", 1), tiny_model("pretraining", 2)
    save_official(fine_tuned, "refcoco", tmp_path / "x.model")
    assert load_encoder(pretrained.encoder, tmp_path / "x.model", rules("pretraining")).missing == ONLY_PRETRAINING
    path = tmp_path / "y.model"
    save_official(tiny_model("pretraining_prec", 1), "pretraining", path)
    fields = {**TINY_ENCODER, "feature_dim": pretrained.encoder.config.feature_dim, "with_pooler": True}
    missing = load_encoder(VLBertModel(PretrainedVLBertConfig(**fields, max_images=2)), path, rules("vcr")).missing
    assert all(name.startswith(("pooler", "embeddings.image_slot")) for name in missing)
    state = state_of(path)
    del state["module.aux_text_visual_embedding.weight"]
    torch.save({"state_dict": state}, path)
    with pytest.raises(ValueError, match=r"1 missing \(embeddings.text_only_embedding.weight\)"):
        load_encoder(VLBertModel(PretrainedVLBertConfig(**fields, text_only_embedding=True)), path, rules("vcr"))


def test_a_head_that_is_switched_off_is_left_over(tmp_path):
    for kind, head in (("pretraining", "masked_regions"), ("vcr", "region_classifier")):
        save_official(tiny_model(kind, 1), kind, tmp_path / f"{kind}.model")
        task = VCRTask(16, VCRConfig(region_loss_weight=0))
        report = load_task(task, tmp_path / f"{kind}.model", rules("vcr"))
        assert f"{head}.transform.dense.weight" in report.unexpected
        assert not any("region" in name for name in (*task.state_dict(), *report.copied))
    task = pretraining_task(16, 40, {"masked_words": 0, "masked_text": 0, "masked_regions": {"classes": 5}})
    report = load_task(task, tmp_path / "pretraining.model", rules("pretraining"))
    assert {name.split(".")[0] for name in report.unexpected} == {"word_head"}
    assert not report.missing and len(report.matched) == len(task.state_dict()) == 4


def test_what_the_official_code_would_compute_otherwise_is_not_written(tmp_path):
    changes = {"geometry": "corners", "visual_part_on_end": True, "whole_image_in_sequence": False}
    for field, value in (changes | {"relative_geometry": True}).items():
        model = tiny_model("refcoco", 1)
        setattr(model.encoder.config, field, value)
        with pytest.raises(ValueError, match=f"x.model: .*{field}"):
            save_official(model, "refcoco", tmp_path / "x.model")
    with pytest.raises(ValueError, match="detection"):
        save_official(tiny_model("refcoco", 1), "detection", tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()
