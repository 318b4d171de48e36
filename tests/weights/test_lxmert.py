"""Conversion of LXMERT to and from the official code and transformers, and initialization from BERT."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LxmertForPreTraining, LxmertForQuestionAnswering, LxmertModel

from detector.config import DetectorConfig
from detector.structures import PrecomputedDetector
from e2e_vl.encoders.lxmert import LxmertEncoder, PretrainedLxmertConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import TextBatch, TextRegions
from e2e_vl.tasks.config import GQAConfig, NLVR2Config, VQAConfig
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.pretraining import PretrainingTask
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.loading import load_encoder, load_task, select_answer_rows
from e2e_vl.weights.lxmert import OfficialLxmert, TransformersLxmert
from tests.encoders.small import LXMERT as SMALL
from tests.encoders.small import make_inputs
from tests.weights.starts import fill, pretraining_task, same
from tests.weights.starts import rules as rules_of

ANSWERS = [f"answer {number}" for number in range(7)]
HEADS = {
    **dict.fromkeys(("masked_text", "masked_regions"), 0.0),
    "relationship": 1.0,
    "object_labels": {"weight": 1.0, "classes": 5},
    "attribute_labels": {"weight": 1.0, "classes": 4},
    "region_features": 1.0,
    "image_qa": {"weight": 1.0, "answers": ANSWERS},
}
rules = partial(rules_of, encoder="lxmert")
same_values = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def make_encoder(seed: int = 0, **fields: Any) -> LxmertEncoder:
    return fill(LxmertEncoder(PretrainedLxmertConfig(**{**SMALL, **fields})), seed)


def pretraining(**settings: Any) -> PretrainingTask:
    task = pretraining_task(32, SMALL["vocab_size"], HEADS, **settings)
    task.region_features.output = nn.Linear(32, SMALL["feature_dim"])
    return fill(task, 3)


def vqa(answers: list[str] = ANSWERS) -> VQATask:
    config = VQAConfig(answers=answers, head_width=2, dropout=0.0, init_from_words=False)
    return fill(VQATask(32, config), 3)


MAKE_TASK = {"pretraining": pretraining, "vqa": vqa, "gqa": lambda: fill(GQATask(32, GQAConfig(answers=ANSWERS)), 3)}


def model_of(task: nn.Module, **fields: Any) -> VisionLanguageModel:
    """With random values, small enough that outputs can be compared."""
    model = VisionLanguageModel(PrecomputedDetector(DetectorConfig()), make_encoder(**fields), task)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.05)
    return model.eval()


def assert_loaded(model: VisionLanguageModel, name: str, path: Path, layout: str) -> None:
    """A file or a folder has everything of the model."""
    encoder, task = make_encoder(1), MAKE_TASK[name]()
    report = load_encoder(encoder, path, rules(name))
    assert report.is_complete and report.layout == layout
    assert load_task(task, path, rules(name)).is_complete
    assert same(model.encoder, encoder) and same(model.task, task)


@pytest.mark.parametrize("module", ["", "module."])
@pytest.mark.parametrize("name", ["pretraining", "vqa"])
def test_official_files_there_and_back(tmp_path: Path, name, module):
    model, path = model_of(MAKE_TASK[name]()), tmp_path / "Epoch20_LXRT.pth"
    assert OfficialLxmert().export(model, name, path) == []
    written = torch.load(path, weights_only=True)
    place = "" if name == "pretraining" else "lxrt_encoder.model."
    assert f"{place}bert.encoder.x_layers.1.visual_attention.att.query.weight" in written
    assert ("cls.predictions.decoder.weight" in written) == (name == "pretraining")
    heads = {key: value for key, value in written.items() if not key.startswith(place)}
    trunk = {key.removeprefix(place): value for key, value in written.items() if key.startswith(place)}
    torch.save(heads | {f"{place}{module}{key}": value for key, value in trunk.items()}, path)
    assert_loaded(model, name, path, "LXMERT")


def test_a_fine_tuned_head_is_one_of_answers_or_of_image_pairs_by_its_width():
    found = OfficialLxmert().convert({"logit_fc.0.weight": torch.zeros(4, 2), "logit_fc.3.bias": torch.zeros(9)}, "f")
    assert {found.task_name, *found.compatible_tasks} == {"vqa", "gqa"}
    assert set(found.task) == {"head.transform.dense.weight", "head.output.bias"}
    found = OfficialLxmert().convert({"logit_fc.0.weight": torch.zeros(4, 4)}, "f")
    assert (found.task_name, found.compatible_tasks) == ("nlvr2", ())


def test_the_papers_encoder_starts_from_an_official_file(tmp_path: Path):
    model, path = model_of(pretraining()), tmp_path / "Epoch20_LXRT.pth"
    OfficialLxmert().export(model, "pretraining", path)
    encoder = make_encoder(1, cross_attention="separate", with_segments=False, pooling="state")
    report = load_encoder(encoder, path, rules("pretraining"))
    assert report.is_complete and report.copied == ["visual_attention -> text_attention"]
    state, official = encoder.state_dict(), model.encoder.state_dict()
    for name, value in state.items():
        assert torch.equal(value, official[name.replace(".text_attention.", ".visual_attention.")]), name


def save_bert(folder: Path, layers: int) -> BertForMaskedLM:
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    bert = fill(BertForMaskedLM(BertConfig(**{name: SMALL[name] for name in sizes}, num_hidden_layers=layers)), 8)
    bert.save_pretrained(folder)
    return bert


@pytest.mark.parametrize(("which", "first"), [("first", 0), ("last", 2)])
def test_layers_of_bert_become_layers_over_words(tmp_path: Path, which, first):
    """Of four layers the first two (official code) or the last two (paper)."""
    bert = save_bert(tmp_path, layers=4)
    encoder, before = make_encoder(1, bert_layers=which), make_encoder(1).state_dict()
    report = load_encoder(encoder, tmp_path, rules("pretraining"))
    assert report.copied == [f"the {which} 2 of BERT's 4 layers -> encoder.layer"] and not report.unexpected
    theirs = bert.bert.state_dict()
    for name, value in encoder.state_dict().items():
        if name.startswith("encoder.layer."):
            number, _, rest = name.removeprefix("encoder.layer.").partition(".")
            assert torch.equal(value, theirs[f"encoder.layer.{int(number) + first}.{rest}"]), name
        else:
            assert torch.equal(value, (theirs if name.startswith("embeddings.") else before)[name]), name


@pytest.mark.parametrize("word_start", ["head", "bias"])
def test_the_word_head_starts_from_bert(tmp_path: Path, word_start):
    """The official pre-training from scratch takes the output bias alone."""
    head = save_bert(tmp_path, layers=2).cls.predictions
    task, before = pretraining(word_start=word_start), pretraining().state_dict()
    report = load_task(task, tmp_path, rules("pretraining"))
    taken = {"word_head.bias": head.bias}
    if word_start == "head":
        taken |= {f"word_head.transform.dense.{name}": value for name, value in head.transform.dense.named_parameters()}
        taken |= {f"word_head.transform.norm.{name}": one for name, one in head.transform.LayerNorm.named_parameters()}
    else:
        assert report.copied == ["word_head.bias -> word_head.bias"]
    for name, value in task.state_dict().items():
        assert torch.equal(value, taken.get(name, before[name])), name
    model = model_of(pretraining())
    OfficialLxmert().export(model, "pretraining", tmp_path / "Epoch20_LXRT.pth")
    assert load_task(task, tmp_path / "Epoch20_LXRT.pth", rules("pretraining")).is_complete
    assert same(model.task, task)  # a pre-training that goes on takes everything


def test_answers_start_from_the_rows_of_the_same_answers(tmp_path: Path):
    model, path = model_of(pretraining()), tmp_path / "Epoch20_LXRT.pth"
    OfficialLxmert().export(model, "pretraining", path)
    task = vqa(["The answer 3.", "unheard of", "answer 0"])
    with pytest.raises(FileNotFoundError, match=r"all_ans\.json"):
        load_task(task, path, rules("vqa"))
    listed = [{"ans": answer, "dsets": ["vqa"]} for answer in ANSWERS]
    (tmp_path / "all_ans.json").write_text(json.dumps(listed), encoding="utf-8")
    report = load_task(task, path, rules("vqa"))
    assert "image_qa.head.output rows of 2 of 3 answers -> head.output" in report.copied
    head, theirs = task.head, model.task.image_qa.head
    assert same(head.transform, theirs.transform)
    for kind in ("weight", "bias"):
        rows, given = getattr(head.output, kind), getattr(theirs.output, kind)
        assert torch.equal(rows[[0, 2]], given[[3, 0]]) and not rows[1].any()
    (tmp_path / "all_ans.json").write_text(json.dumps(listed[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"7 answers, .* 6"):
        load_task(task, path, rules("vqa"))
    rows = torch.arange(6.0).view(3, 2) + 1
    found = select_answer_rows(rows, ["2", "gray", "cat"], ["a cat", "dog", "Two.", "grey"], "weight")
    assert found.tolist() == [[5, 6], [0, 0], [1, 2], [3, 4]]


# Folders of transformers


export_folder = TransformersLxmert().export


def their_inputs(texts: TextBatch, regions: TextRegions) -> dict[str, Tensor]:
    return {
        "input_ids": texts.input_ids,
        "token_type_ids": texts.token_type_ids,
        "attention_mask": texts.attention_mask.float(),
        "visual_feats": regions.features,
        "visual_pos": regions.boxes / regions.image_sizes.flip(-1).repeat(1, 1, 2),
        "visual_attention_mask": regions.attention_mask.float(),
    }


def load_in_transformers(architecture: type, model: VisionLanguageModel, folder: Path) -> nn.Module:
    """As `from_pretrained`, and nothing is missing or left over; the trunk computes the same."""
    theirs, found = architecture.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    texts, regions = make_inputs(counts=(2, 4, 1))
    trunk = theirs.eval() if architecture is LxmertModel else theirs.lxmert
    with torch.no_grad():
        ours, found = model.encoder(texts, regions), trunk(**their_inputs(texts, regions))
    same_values(ours.summary, found.pooled_output)
    same_values(ours.text, found.language_output * texts.attention_mask[..., None])
    same_values(ours.regions, found.vision_output * regions.attention_mask[..., None])
    assert ours.text.std() > 0.05 and ours.summary.std() > 0.05
    return theirs


@pytest.mark.parametrize("name", ["vqa", "gqa"])
def test_a_model_of_questions_there_and_back(tmp_path: Path, name):
    """A run of VQA or GQA, `LxmertForQuestionAnswering`, and again ours."""
    model = model_of(MAKE_TASK[name]())
    assert export_folder(model, name, tmp_path / "model.safetensors") == []
    theirs = load_in_transformers(LxmertForQuestionAnswering, model, tmp_path)
    assert (theirs.config.num_qa_labels, theirs.config.visual_feat_dim) == (len(ANSWERS), SMALL["feature_dim"])
    texts, regions = make_inputs(counts=(2, 4, 1))
    with torch.no_grad():
        ours = model.task.head(model.encoder(texts, regions).summary)
        found = theirs(**their_inputs(texts, regions)).question_answering_score
    same_values(ours, found)
    assert found.std() > 0.05
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        assert_loaded(model, name, folder, "transformers' LXMERT")


def test_a_model_of_pre_training_there_and_back(tmp_path: Path):
    model = model_of(pretraining())
    assert export_folder(model, "pretraining", tmp_path / "model.safetensors") == []
    theirs = load_in_transformers(LxmertForPreTraining, model, tmp_path)
    config = theirs.config
    assert (config.num_object_labels, config.num_attr_labels, config.num_qa_labels) == (5, 4, len(ANSWERS))
    assert config.visual_loss_normalizer == pytest.approx(1 / 0.15)
    texts, regions = make_inputs(counts=(2, 4, 1))
    with torch.no_grad():
        ours, found = model.encoder(texts, regions), theirs(**their_inputs(texts, regions))
        words = model.task.word_head(ours.text, ours.word_embeddings)
        seen = model.task.region_transform(ours.regions)
        objects = theirs.obj_predict_head(ours.regions)
    attention_mask = texts.attention_mask
    same_values(words[attention_mask], found.prediction_logits[attention_mask])
    same_values(model.task.relationship.head(ours.summary), found.cross_relationship_score)
    same_values(model.task.image_qa.head(ours.summary), found.question_answering_score)
    for kind, head in {"obj": "object_labels", "attr": "attribute_labels", "feat": "region_features"}.items():
        same_values(getattr(model.task, head).output(seen), objects[kind])
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        assert_loaded(model, "pretraining", folder, "transformers' LXMERT")


def test_what_transformers_has_no_place_for_is_left_out(tmp_path: Path):
    """A task, a head or objectives; without heads the trunk alone is written, with our names."""
    objectives = HEADS | {"masked_regions": 1.0, "attribute_labels": 0.0, "image_qa": 0.0, "region_features": 0.0}
    model = model_of(pretraining_task(32, SMALL["vocab_size"], objectives))
    left_out = export_folder(model, "pretraining", tmp_path / "some" / "model.safetensors")
    assert left_out and all(name.startswith("task.masked_regions.") for name in left_out)
    theirs = load_in_transformers(LxmertForPreTraining, model, tmp_path / "some")
    assert set(theirs.obj_predict_head.decoder_dict) == {"obj"} and not theirs.config.task_qa
    narrow = VQATask(32, VQAConfig(answers=ANSWERS, init_from_words=False))
    without_match = pretraining_task(32, SMALL["vocab_size"], HEADS | {"relationship": 0.0})
    tasks = {"nlvr2": NLVR2Task(32, NLVR2Config()), "vqa": narrow, "pretraining": without_match}
    for name, task in tasks.items():
        model, folder = model_of(task), tmp_path / name
        left_out = export_folder(model, name, folder / "model.safetensors")
        assert left_out == [f"task.{key}" for key in task.state_dict()]
        assert load_in_transformers(LxmertModel, model, folder).config.architectures == ["LxmertModel"]
        encoder = make_encoder(2)
        assert load_encoder(encoder, folder, rules(name)).is_complete and same(model.encoder, encoder)


@pytest.mark.parametrize(
    ("export", "field", "value"),
    [
        (OfficialLxmert().export, "cross_attention", "separate"),
        (export_folder, "max_images", 2),
        (export_folder, "named_regions", True),
        (export_folder, "relative_geometry", True),
        (export_folder, "layer_norm_eps", 1e-5),
    ],
)
def test_what_the_other_project_would_compute_otherwise_is_not_written(tmp_path: Path, export, field, value):
    with pytest.raises(ValueError, match=rf"model\.x: .*{field}"):
        export(model_of(vqa(), **{field: value}), "vqa", tmp_path / "model.x")
    with pytest.raises(ValueError, match="refcoco"):
        OfficialLxmert().export(model_of(ReferringTask(32)), "refcoco", tmp_path / "model.x")
    assert not list(tmp_path.iterdir())
