"""Official LXMERT checkpoints in and out, transformers' LXMERT in, and BERT as a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LxmertConfig,
    LxmertForPreTraining,
    LxmertForQuestionAnswering,
    LxmertModel,
)

from detector.config import DetectorConfig
from detector.precomputed import PrecomputedDetector
from e2e_vl.encoders.lxmert import LxmertEncoder, LxmertEncoderConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import ADAPTERS
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.lxmert import OfficialLxmert
from e2e_vl.weights.start import StartRules, load_encoder, load_task, rows_of_answers
from tests.encoders.small import LXMERT as SMALL
from tests.weights.starts import pretraining_task

ANSWERS = [f"answer {number}" for number in range(7)]
HEADS = {
    **dict.fromkeys(("masked_text", "masked_regions"), 0.0),
    "relationship": 1.0,
    "object_labels": {"weight": 1.0, "classes": 5},
    "attribute_labels": {"weight": 1.0, "classes": 4},
    "region_features": 1.0,
    "image_qa": {"weight": 1.0, "answers": ANSWERS},
}
THEIRS = {name: SMALL[name] for name in SMALL if name != "feature_dim"} | {"visual_feat_dim": SMALL["feature_dim"]}


def rules(task_name: str) -> StartRules:
    return StartRules(task_name, ADAPTERS["lxmert"])


def fill(module: nn.Module, seed: int) -> nn.Module:
    """Values that tell all parameters apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return module


def make_encoder(seed: int = 0, **fields) -> LxmertEncoder:
    return fill(LxmertEncoder(LxmertEncoderConfig(**{**SMALL, **fields})), seed)


def make_task(name: str, seed: int = 0, answers: list[str] | None = None, **settings) -> nn.Module:
    if name == "pretraining":
        task = pretraining_task(32, SMALL["vocab_size"], HEADS, **settings)
        task.region_features.output = nn.Linear(32, SMALL["feature_dim"])
    else:
        config = VQAConfig(answers=answers or ANSWERS, head_width=2, dropout=0.0, initialise_from_words=False)
        task = VQATask(32, config)
    return fill(task, seed)


def make_model(name: str, seed: int = 0, **fields) -> VisionLanguageModel:
    return VisionLanguageModel(
        PrecomputedDetector(DetectorConfig()), make_encoder(seed, **fields), make_task(name, seed)
    )


def assert_same(one: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    assert state.keys() == one.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("module", ["", "module."])
@pytest.mark.parametrize("name", ["pretraining", "vqa"])
def test_official_files_there_and_back(tmp_path: Path, name, module):
    model, path = make_model(name), tmp_path / "Epoch20_LXRT.pth"
    assert OfficialLxmert().export(model, name, path) == []
    written = torch.load(path, weights_only=True)
    place = "" if name == "pretraining" else "lxrt_encoder.model."
    assert f"{place}bert.encoder.x_layers.1.visual_attention.att.query.weight" in written
    assert ("cls.predictions.decoder.weight" in written) == (name == "pretraining")
    torch.save(
        {place + module + key.removeprefix(place) if key.startswith(place) else key: written[key] for key in written},
        path,
    )
    encoder, task = make_encoder(1), make_task(name, 1)
    report = load_encoder(encoder, path, rules(name))
    assert report.is_complete and report.layout == "LXMERT"
    assert load_task(task, path, rules(name)).is_complete
    assert_same(model.encoder, encoder)
    assert_same(model.task, task)


@pytest.mark.parametrize("name", ["vqa", "gqa"])
def test_a_fine_tuned_head_fits_every_task_with_a_list_of_answers(name):
    found = OfficialLxmert().convert({"logit_fc.0.weight": torch.zeros(4, 2), "logit_fc.3.bias": torch.zeros(9)}, "f")
    assert name in {found.task_name, *found.compatible_tasks}
    assert set(found.task) == {"head.transform.dense.weight", "head.output.bias"}


def test_a_head_of_image_pairs_is_told_by_its_width():
    found = OfficialLxmert().convert({"logit_fc.0.weight": torch.zeros(4, 4)}, "f")
    assert (found.task_name, found.compatible_tasks) == ("nlvr2", ())


def test_transformers_pretraining_model(tmp_path: Path):
    config = LxmertConfig(**THEIRS, num_object_labels=5, num_attr_labels=4, num_qa_labels=len(ANSWERS))
    theirs = fill(LxmertForPreTraining(config), 3)
    theirs.save_pretrained(tmp_path)
    encoder, task = make_encoder(1), make_task("pretraining", 1)
    assert load_encoder(encoder, tmp_path, rules("pretraining")).is_complete
    assert load_task(task, tmp_path, rules("pretraining")).is_complete
    assert_same(encoder, theirs.lxmert)
    assert torch.equal(task.image_qa.head.output.weight, theirs.answer_head.logit_fc[3].weight)
    assert torch.equal(task.object_labels.output.weight, theirs.obj_predict_head.decoder_dict["obj"].weight)
    assert torch.equal(task.region_features.output.bias, theirs.obj_predict_head.decoder_dict["feat"].bias)


def test_transformers_question_answering_and_bare_models(tmp_path: Path):
    answering = fill(LxmertForQuestionAnswering(LxmertConfig(**THEIRS, num_qa_labels=len(ANSWERS))), 4)
    answering.save_pretrained(tmp_path / "answering")
    encoder, task = make_encoder(1), make_task("vqa", 1)
    assert load_encoder(encoder, tmp_path / "answering", rules("vqa")).is_complete
    assert load_task(task, tmp_path / "answering", rules("vqa")).is_complete
    assert_same(encoder, answering.lxmert)
    assert torch.equal(task.head.transform["norm"].bias, answering.answer_head.logit_fc[2].bias)
    bare = fill(LxmertModel(LxmertConfig(**THEIRS)), 5)
    bare.save_pretrained(tmp_path / "bare")
    assert load_encoder(encoder, tmp_path / "bare", rules("vqa")).is_complete
    assert_same(encoder, bare)


def test_another_number_of_heads_is_refused(tmp_path: Path):
    LxmertModel(LxmertConfig(**{**THEIRS, "num_attention_heads": 8})).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_attention_heads is 8, but the encoder's is 4"):
        load_encoder(make_encoder(), tmp_path, rules("vqa"))


def test_our_own_encoder_is_not_taken_for_another(tmp_path: Path):
    encoder = make_encoder(6)
    encoder.save_pretrained(tmp_path)
    other = make_encoder(7)
    report = load_encoder(other, tmp_path, rules("vqa"))
    assert report.is_complete and report.layout == "this project"
    assert_same(encoder, other)


def test_the_papers_encoder_starts_from_an_official_file(tmp_path: Path):
    model, path = make_model("pretraining"), tmp_path / "Epoch20_LXRT.pth"
    OfficialLxmert().export(model, "pretraining", path)
    encoder = make_encoder(1, cross_attention="separate", with_segments=False, pooled="state")
    report = load_encoder(encoder, path, rules("pretraining"))
    assert report.is_complete and report.copied == ["visual_attention -> text_attention"]
    state, official = encoder.state_dict(), model.encoder.state_dict()
    for name, value in state.items():
        assert torch.equal(value, official[name.replace(".text_attention.", ".visual_attention.")]), name


def save_bert(folder: Path, layers: int) -> BertForMaskedLM:
    same = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    bert = BertForMaskedLM(BertConfig(**{name: SMALL[name] for name in same}, num_hidden_layers=layers))
    fill(bert, 8).save_pretrained(folder)
    return bert


def test_bert_fills_the_layers_over_words(tmp_path: Path):
    bert = save_bert(tmp_path, layers=4)
    encoder, before = make_encoder(1), make_encoder(1).state_dict()
    report = load_encoder(encoder, tmp_path, rules("pretraining"))
    assert report.copied == ["the first 2 of BERT's 4 layers -> encoder.layer"] and not report.unexpected
    theirs = bert.bert.state_dict()
    for name, value in encoder.state_dict().items():
        is_theirs = name.startswith(("embeddings.", "encoder.layer."))
        assert torch.equal(value, (theirs if is_theirs else before)[name]), name
    task = make_task("pretraining", 1)
    load_task(task, tmp_path, rules("pretraining"))
    head = bert.cls.predictions
    assert torch.equal(task.word_head.transform["dense"].weight, head.transform.dense.weight)
    assert torch.equal(task.word_head.bias, head.bias)


def test_the_top_layers_of_bert_are_the_papers_side(tmp_path: Path):
    """BERT's layers 2 and 3 of four become our layers 0 and 1; the rest is as with the first layers."""
    bert = save_bert(tmp_path, layers=4)
    encoder = make_encoder(1, bert_layers="last")
    report = load_encoder(encoder, tmp_path, rules("pretraining"))
    assert report.copied == ["the last 2 of BERT's 4 layers -> encoder.layer"] and not report.unexpected
    theirs, checked = bert.bert.state_dict(), 0
    for name, value in encoder.state_dict().items():
        if name.startswith("encoder.layer."):
            number, _, rest = name.removeprefix("encoder.layer.").partition(".")
            assert torch.equal(value, theirs[f"encoder.layer.{int(number) + 2}.{rest}"]), name
            checked += 1
        elif name.startswith("embeddings."):
            assert torch.equal(value, theirs[name]), name
    assert checked == 2 * 16
    with pytest.raises(ValueError, match="bert_layers"):
        make_encoder(bert_layers="top")


def test_the_output_bias_of_words_alone_starts_from_bert(tmp_path: Path):
    """As the official pre-training from scratch; all else keeps its start."""
    bert = save_bert(tmp_path, layers=2)
    task, before = (make_task("pretraining", 1, word_start="bias") for _ in range(2))
    report = load_task(task, tmp_path, rules("pretraining"))
    assert report.copied == ["word_head.bias -> word_head.bias"]
    for name, value in task.state_dict().items():
        is_theirs = name == "word_head.bias"
        assert torch.equal(value, bert.cls.predictions.bias if is_theirs else before.state_dict()[name]), name
    model = make_model("pretraining", 5)
    OfficialLxmert().export(model, "pretraining", tmp_path / "Epoch20_LXRT.pth")
    assert load_task(task, tmp_path / "Epoch20_LXRT.pth", rules("pretraining")).is_complete
    assert_same(model.task, task)  # a pre-training that goes on takes everything


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_bert_with_too_few_layers_is_refused(tmp_path: Path, which):
    save_bert(tmp_path, layers=1)
    with pytest.raises(ValueError, match=r"encoder\.layer\.1"):
        load_encoder(make_encoder(bert_layers=which), tmp_path, rules("pretraining"))


def test_answers_start_from_the_rows_of_the_same_answers(tmp_path: Path):
    model, path = make_model("pretraining"), tmp_path / "Epoch20_LXRT.pth"
    OfficialLxmert().export(model, "pretraining", path)
    answers = ["The answer 3.", "unheard of", "answer 0"]
    task = make_task("vqa", 1, answers)
    with pytest.raises(FileNotFoundError, match=r"put all_ans\.json of the project that published it"):
        load_task(task, path, rules("vqa"))
    listed = [{"ans": answer, "dsets": ["vqa"]} for answer in ANSWERS]
    (tmp_path / "all_ans.json").write_text(json.dumps(listed), encoding="utf-8")
    report = load_task(task, path, rules("vqa"))
    assert "image_qa.head.output rows of 2 of 3 answers -> head.output" in report.copied
    head, theirs = task.head, model.task.image_qa.head
    assert_same(head.transform, theirs.transform)
    for kind in ("weight", "bias"):
        rows, given = getattr(head.output, kind), getattr(theirs.output, kind)
        assert torch.equal(rows[[0, 2]], given[[3, 0]]) and not rows[1].any()
    (tmp_path / "all_ans.json").write_text(json.dumps(listed[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match="has 7 answers, and the list beside it 6"):
        load_task(task, path, rules("vqa"))


def test_rows_of_answers():
    rows = torch.arange(6.0).view(3, 2) + 1
    found = rows_of_answers(rows, ["2", "gray", "cat"], ["a cat", "dog", "Two."], "weight")
    assert found.tolist() == [[5, 6], [0, 0], [1, 2]]
    assert rows_of_answers(rows[:, 0], ["2", "gray", "cat"], ["grey"], "bias").tolist() == [3]


def test_damaged_and_strange_files():
    adapter, words = OfficialLxmert(), torch.rand(4, 2)
    file = {"bert.embeddings.word_embeddings.weight": words, "cls.predictions.decoder.weight": words + 1}
    with pytest.raises(ValueError, match=r"f: the decoder of words differs from the word embeddings"):
        adapter.convert(file, "f")
    with pytest.raises(ValueError, match=r"f: bert\.unheard\.of is no name of a LXMERT model"):
        adapter.convert({"bert.unheard.of": words}, "f")
    assert not adapter.recognise({"bert.embeddings.word_embeddings.weight": words})
    assert adapter.recognise({"module.bert.encoder.visn_fc.box_fc.weight": words})


def test_models_that_the_official_code_does_not_have(tmp_path: Path):
    export = OfficialLxmert().export
    with pytest.raises(ValueError, match=r"are named \*\.pth"):
        export(make_model("vqa"), "vqa", tmp_path / "a.model")
    with pytest.raises(ValueError, match="no encoder with cross_attention = separate"):
        export(make_model("vqa", cross_attention="separate"), "vqa", tmp_path / "a.pth")
    parts = PrecomputedDetector(DetectorConfig()), make_encoder(), ReferringTask(32)
    with pytest.raises(ValueError, match="no official LXMERT model for the task 'refcoco'"):
        export(VisionLanguageModel(*parts), "refcoco", tmp_path / "a.pth")
