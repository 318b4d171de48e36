"""Models of ours as folders of transformers' LXMERT: it computes the same, and we read them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LxmertForPreTraining, LxmertForQuestionAnswering, LxmertModel

from detector.config import DetectorConfig
from detector.errors import UserError
from detector.precomputed import PrecomputedDetector
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import TextBatch, TextRegions
from e2e_vl.tasks.config import GQAConfig, NLVR2Config, VQAConfig
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.lxmert import OfficialLxmert, TransformersLxmert
from e2e_vl.weights.start import load_encoder, load_task
from tests.encoders.small import LXMERT as SMALL
from tests.encoders.small import make_inputs
from tests.weights.starts import pretraining_task
from tests.weights.test_lxmert_weights import ANSWERS, HEADS, assert_same, make_encoder, make_task, rules

export_folder = TransformersLxmert().export


def moderate(module: nn.Module, seed: int) -> nn.Module:
    """Random values, small enough that outputs can be compared."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.05)
    return module


def model_of(task: nn.Module, seed: int = 1, **fields: Any) -> VisionLanguageModel:
    model = VisionLanguageModel(PrecomputedDetector(DetectorConfig()), make_encoder(**fields), task)
    return moderate(model, seed).eval()


def load_strictly(architecture: type, folder: Path) -> nn.Module:
    """As `from_pretrained`, and nothing is missing or left over."""
    model, found = architecture.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def their_inputs(texts: TextBatch, regions: TextRegions) -> dict[str, Tensor]:
    return {
        "input_ids": texts.input_ids,
        "token_type_ids": texts.token_type_ids,
        "attention_mask": texts.attention_mask.float(),
        "visual_feats": regions.features,
        "visual_pos": regions.boxes / regions.image_sizes.flip(-1).repeat(1, 1, 2),
        "visual_attention_mask": regions.attention_mask.float(),
    }


def assert_trunks_agree(model: VisionLanguageModel, theirs: nn.Module) -> None:
    """States of words and regions and the summary, apart from padding."""
    texts, regions = make_inputs(counts=(2, 4, 1))
    with torch.no_grad():
        ours, found = model.encoder(texts, regions), theirs(**their_inputs(texts, regions))
    torch.testing.assert_close(ours.summary, found.pooled_output, rtol=1e-5, atol=1e-5)
    text, seen = (
        found.language_output * texts.attention_mask[..., None],
        found.vision_output * regions.attention_mask[..., None],
    )
    torch.testing.assert_close(ours.text, text, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.regions, seen, rtol=1e-5, atol=1e-5)
    assert ours.text.std() > 0.05 and ours.summary.std() > 0.05


def gqa_task() -> GQATask:
    return GQATask(32, GQAConfig(answers=ANSWERS))


@pytest.mark.parametrize("name", ["vqa", "gqa"])
def test_a_model_of_questions_there_and_back(tmp_path: Path, name):
    """A run of VQA or GQA, `LxmertForQuestionAnswering`, and again ours."""
    make = {"vqa": lambda: make_task("vqa"), "gqa": gqa_task}[name]
    model = model_of(make())
    assert export_folder(model, name, tmp_path / "model.safetensors") == []
    theirs = load_strictly(LxmertForQuestionAnswering, tmp_path)
    assert (theirs.config.num_qa_labels, theirs.config.visual_feat_dim) == (len(ANSWERS), SMALL["feature_dim"])
    assert_same(model.encoder, theirs.lxmert)
    assert_trunks_agree(model, theirs.lxmert)
    texts, regions = make_inputs(counts=(2, 4, 1))
    with torch.no_grad():
        ours = model.task.head(model.encoder(texts, regions).summary)
        found = theirs(**their_inputs(texts, regions)).question_answering_score
    torch.testing.assert_close(ours, found, rtol=1e-5, atol=1e-5)
    assert found.std() > 0.05
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        encoder, task = make_encoder(1), moderate(make(), 2)
        report = load_encoder(encoder, folder, rules(name))
        assert report.is_complete and report.layout == "transformers' LXMERT"
        assert load_task(task, folder, rules(name)).is_complete
        assert_same(model.encoder, encoder)
        assert_same(model.task, task)


def test_a_model_of_pre_training_there_and_back(tmp_path: Path):
    model = model_of(make_task("pretraining"))
    assert export_folder(model, "pretraining", tmp_path / "model.safetensors") == []
    theirs = load_strictly(LxmertForPreTraining, tmp_path)
    config = theirs.config
    assert (config.num_object_labels, config.num_attr_labels, config.num_qa_labels) == (5, 4, len(ANSWERS))
    assert config.visual_loss_normalizer == pytest.approx(1 / 0.15)
    assert_trunks_agree(model, theirs.lxmert)
    texts, regions = make_inputs(counts=(2, 4, 1))
    with torch.no_grad():
        ours, found = model.encoder(texts, regions), theirs(**their_inputs(texts, regions))
        words = model.task.word_head(ours.text, ours.word_embeddings)
        match = model.task.relationship.head(ours.summary)
        answers = model.task.image_qa.head(ours.summary)
        seen = model.task.region_transform(ours.regions)
        objects = theirs.obj_predict_head(ours.regions)
    attention_mask = texts.attention_mask
    torch.testing.assert_close(words[attention_mask], found.prediction_logits[attention_mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(match, found.cross_relationship_score, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(answers, found.question_answering_score, rtol=1e-5, atol=1e-5)
    assert ours.regions.any()
    for kind, head in {"obj": "object_labels", "attr": "attribute_labels", "feat": "region_features"}.items():
        torch.testing.assert_close(getattr(model.task, head).output(seen), objects[kind], rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        encoder, task = make_encoder(1), make_task("pretraining", 1)
        assert load_encoder(encoder, folder, rules("pretraining")).is_complete
        assert load_task(task, folder, rules("pretraining")).is_complete
        assert_same(model.encoder, encoder)
        assert_same(model.task, task)


def test_some_objectives_only(tmp_path: Path):
    """Transformers' config says which heads there are; regions of VL-BERT's kind have no place."""
    objectives = HEADS | {"masked_regions": 1.0, "attribute_labels": 0.0, "image_qa": 0.0, "region_features": 0.0}
    model = model_of(pretraining_task(32, SMALL["vocab_size"], objectives))
    left_out = export_folder(model, "pretraining", tmp_path / "model.safetensors")
    assert left_out and all(name.startswith("task.masked_regions.") for name in left_out)
    theirs = load_strictly(LxmertForPreTraining, tmp_path)
    assert set(theirs.obj_predict_head.decoder_dict) == {"obj"} and not theirs.config.task_qa


def test_a_trunk_alone_has_our_names(tmp_path: Path):
    """A task, a head or objectives that transformers does not have."""
    narrow = VQATask(32, VQAConfig(answers=ANSWERS, initialise_from_words=False))
    without_match = pretraining_task(32, SMALL["vocab_size"], HEADS | {"relationship": 0.0})
    tasks = {"nlvr2": NLVR2Task(32, NLVR2Config()), "vqa": narrow, "pretraining": without_match}
    for name, task in tasks.items():
        model, folder = model_of(task), tmp_path / name
        left_out = export_folder(model, name, folder / "model.safetensors")
        assert left_out == [f"task.{key}" for key in task.state_dict()]
        theirs = load_strictly(LxmertModel, folder)
        assert theirs.config.architectures == ["LxmertModel"]
        assert_trunks_agree(model, theirs)
        encoder = make_encoder(2)
        assert load_encoder(encoder, folder, rules(name)).is_complete
        assert_same(model.encoder, encoder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_images", 2),
        ("named_regions", True),
        ("cross_attention", "separate"),
        ("relative_geometry", True),
        ("with_segments", False),
        ("pooled", "state"),
        ("layer_norm_eps", 1e-5),
    ],
)
def test_what_transformers_cannot_compute_is_not_written(tmp_path: Path, field, value):
    with pytest.raises(UserError, match=f"such files have no encoder with {field} = {value}"):
        export_folder(model_of(make_task("vqa"), **{field: value}), "vqa", tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_another_file_name_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"name the output .*out/model\.safetensors"):
        export_folder(model_of(make_task("vqa")), "vqa", tmp_path / "out.safetensors")


@pytest.mark.parametrize("field", ["named_regions", "relative_geometry"])
def test_additions_of_ours_have_no_official_file(tmp_path: Path, field):
    with pytest.raises(ValueError, match=f"such files have no encoder with {field} = True"):
        OfficialLxmert().export(model_of(make_task("vqa"), **{field: True}), "vqa", tmp_path / "a.pth")
