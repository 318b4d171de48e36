"""BERT of transformers as a start, in the formats and with the names of its old and new versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel

from e2e_vl.encoders.vl_bert import VLBertConfig, VLBertModel
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.detection import DetectionTask
from e2e_vl.tasks.pretraining import PretrainingTask
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights import start
from e2e_vl.weights.start import load_encoder, load_task
from tests.weights.starts import pretraining_task, rules

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 20}
OWN = ("region", "end_embedding", "text_visual", "text_only")  # parts of names that BERT has nothing for


@pytest.fixture
def bert() -> BertForMaskedLM:
    torch.manual_seed(1)
    model = BertForMaskedLM(BertConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape))
    return model


def vl_bert(**fields) -> VLBertModel:
    torch.manual_seed(2)
    return VLBertModel(VLBertConfig(**{**SIZES, "feature_dim": 8, "geometry_dim": 8, **fields}))


def pretraining() -> PretrainingTask:
    return pretraining_task(16, 40, {"masked_regions": {"classes": 5}})


def save_old(bert: BertForMaskedLM, folder: Path) -> Path:
    """As the first versions: `pytorch_model.bin`, gamma and beta, everything that is now shared or left out."""
    state = dict(bert.state_dict())
    state |= {"bert.pooler.dense.weight": torch.rand(16, 16), "bert.pooler.dense.bias": torch.rand(16)}
    state |= {"cls.seq_relationship.weight": torch.rand(2, 16), "cls.seq_relationship.bias": torch.rand(2)}
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    state.pop("cls.predictions.decoder.bias", None)
    state["bert.embeddings.position_ids"] = torch.arange(20)[None]
    new = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for ending, old in new.items():
        state = {name.replace(ending, old): value for name, value in state.items()}
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(bert.config.to_dict()))
    return folder


def save_new(bert: BertForMaskedLM, folder: Path) -> Path:
    bert.save_pretrained(folder)
    assert (folder / "model.safetensors").is_file()
    return folder


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("save", [save_old, save_new])
def test_encoder_and_word_head_start_from_bert(tmp_path, bert, save, as_file):
    path = save(bert, tmp_path / "bert")
    if as_file:
        path = next(path / name for name in start.FILES if (path / name).is_file())
    encoder, task = vl_bert(text_only_embedding=True), pretraining()
    own = {name: value.clone() for name, value in encoder.state_dict().items()}
    report = load_encoder(encoder, path, rules("pretraining"))
    assert report.layout == "BERT"
    assert report.missing
    assert all(any(part in name for part in OWN) for name in report.missing)
    assert all(torch.equal(encoder.state_dict()[name], own[name]) for name in report.missing)
    theirs, ours = bert.bert, encoder
    for a, b in (
        (theirs.embeddings.word_embeddings, ours.embeddings.word_embeddings),
        (theirs.embeddings.position_embeddings, ours.embeddings.position_embeddings),
        (theirs.embeddings.LayerNorm, ours.embeddings.norm),
        (theirs.encoder.layer[1].output.LayerNorm, ours.layers[1].output.LayerNorm),
        (theirs.encoder.layer[1].attention.self.value, ours.layers[1].attention.self.value),
    ):
        assert all(torch.equal(b.state_dict()[name], value) for name, value in a.state_dict().items())
    segments = ours.embeddings.segment_embeddings.weight
    assert torch.equal(segments[:2], theirs.embeddings.token_type_embeddings.weight)
    assert torch.equal(segments[2], own["embeddings.segment_embeddings.weight"][2])

    report = load_task(task, path, rules("pretraining"))
    assert all(name.startswith("masked_regions.") for name in report.missing)
    head = bert.cls.predictions
    assert torch.equal(task.word_head.transform["dense"].weight, head.transform.dense.weight)
    assert torch.equal(task.word_head.transform["norm"].bias, head.transform.LayerNorm.bias)
    assert torch.equal(task.word_head.bias, head.bias)


def test_the_pooler_comes_along_where_there_is_one(tmp_path, bert):
    folder = save_old(bert, tmp_path / "bert")
    encoder = vl_bert(with_pooler=True)
    assert not [name for name in load_encoder(encoder, folder, rules("vcr")).missing if "pooler" in name]
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert torch.equal(encoder.pooler.dense.weight, state["bert.pooler.dense.weight"])
    assert "pooler.dense.weight" in load_encoder(vl_bert(), folder, rules("vcr")).unexpected


def test_bert_keeps_its_two_segments_where_a_task_copies_the_first(tmp_path, bert):
    """Both were trained, other than in VL-BERT's pre-training."""
    encoder = vl_bert(with_pooler=True)
    load_encoder(encoder, save_old(bert, tmp_path / "bert"), rules("vcr"))
    segments = encoder.embeddings.segment_embeddings.weight[:2]
    assert torch.equal(segments, bert.bert.embeddings.token_type_embeddings.weight)
    assert not torch.equal(segments[0], segments[1])


def test_heads_that_start_from_bert_and_heads_that_do_not(tmp_path, bert):
    folder = save_new(bert, tmp_path / "bert")
    task = VQATask(16, VQAConfig(answers=["yes", "no"]))
    report = load_task(task, folder, rules("vqa"))
    assert torch.equal(task.head.transform["dense"].weight, bert.cls.predictions.transform.dense.weight)
    assert report.missing == ["head.output.weight", "head.output.bias"] and report.unexpected == ["word_head.bias"]
    for name, task in (("refcoco", ReferringTask(16)), ("vcr", VCRTask(16)), ("detection", DetectionTask(16))):
        with pytest.raises(ValueError, match=rf"holds a BERT, and no rule says how the head of {name} starts from it"):
            load_task(task, folder, rules(name))


def test_a_bert_without_a_head_has_names_without_a_prefix(tmp_path, bert):
    plain = BertModel(BertConfig(**SIZES))
    plain.save_pretrained(tmp_path / "plain")
    assert "encoder.layer.0.output.dense.bias" in load_file(tmp_path / "plain" / "model.safetensors")
    encoder = vl_bert()
    load_encoder(encoder, tmp_path / "plain", rules("refcoco"))
    assert torch.equal(encoder.layers[0].output.dense.weight, plain.encoder.layer[0].output.dense.weight)
    with pytest.raises(ValueError, match=r"model.safetensors does not fit .*missing \(word_head.bias"):
        load_task(pretraining(), tmp_path / "plain", rules("pretraining"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 41}, r"model.safetensors: this BERT has 40 wordpieces, .* 41; set data.vocabulary"),
        ({"max_position_embeddings": 10}, r"has 20 positions, .* 10; set encoder.config.max_position_embeddings"),
        ({"hidden_size": 32}, r"model.safetensors does not fit .*mismatched \(embeddings.word_embeddings.weight"),
        ({"num_hidden_layers": 3}, r"model.safetensors does not fit .*missing \(layers.2.attention"),
        ({"num_hidden_layers": 1}, r"model.safetensors does not fit .*unexpected \(layers.1.attention"),
        ({"num_attention_heads": 4}, r"config.json: num_attention_heads is 2, .* set encoder.config.num_attention"),
    ],
)
def test_another_architecture_is_refused(tmp_path, bert, fields, message):
    save_new(bert, tmp_path / "bert")
    encoder = vl_bert(**fields)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_encoder(encoder, tmp_path / "bert", rules("refcoco"))
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_an_encoder_of_ours_with_another_geometry_is_refused(tmp_path):
    vl_bert(geometry="corners").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config.json: geometry is corners, but the encoder's is centre_size; set"):
        load_encoder(vl_bert(), tmp_path, rules("refcoco"))


def test_what_is_no_bert_is_refused(tmp_path, bert):
    def write(state: dict[str, Tensor]) -> Path:
        torch.save(state, tmp_path / "x.bin")
        return tmp_path / "x.bin"

    state = dict(bert.state_dict())
    with pytest.raises(ValueError, match=r"x.bin: bert.adapter.weight is no name of a BERT model"):
        load_encoder(vl_bert(), write({**state, "bert.adapter.weight": torch.zeros(1)}), rules("refcoco"))
    untied = {**state, "cls.predictions.decoder.weight": torch.zeros(40, 16)}
    with pytest.raises(ValueError, match=r"x.bin: the decoder of words differs from the word embeddings"):
        load_encoder(vl_bert(), write(untied), rules("refcoco"))
    with pytest.raises(ValueError, match=r"x.bin does not fit .*unexpected \(roberta.x\)"):
        load_encoder(vl_bert(), write({"roberta.x": torch.zeros(1)}), rules("refcoco"))


@pytest.mark.parametrize("name", ["missing.bin", "no/such/folder", "./bert"])
def test_a_path_to_nothing_never_reaches_for_the_network(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "cached_file", lambda *args, **options: pytest.fail("network"))
    with pytest.raises(FileNotFoundError, match="no such weights file or folder"):
        load_encoder(vl_bert(), name, rules("refcoco"))


def test_a_hub_name_is_fetched_by_transformers(tmp_path, monkeypatch, bert):
    folder = save_new(bert, tmp_path / "cache")

    def cached_file(name: str, file: str, **_: object) -> str | None:
        if name != "org/bert-tiny":
            raise OSError("not reachable")
        return str(folder / file) if (folder / file).is_file() else None

    monkeypatch.setattr(start, "cached_file", cached_file)
    encoder = vl_bert()
    load_encoder(encoder, "org/bert-tiny", rules("refcoco"))
    assert torch.equal(encoder.embeddings.word_embeddings.weight, bert.bert.embeddings.word_embeddings.weight)
    with pytest.raises(FileNotFoundError, match=r"bert-nano: neither a local file .* \(not reachable\)"):
        load_encoder(vl_bert(), "bert-nano", rules("refcoco"))
