"""VL-BERT initialised from BERT, with the formats and names of old and new versions of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from e2e_vl.encoders.vl_bert import PretrainedVLBertConfig, VLBertModel
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights import loading
from e2e_vl.weights.loading import load_encoder, load_task
from tests.weights.starts import BERT_SIZES as SIZES
from tests.weights.starts import fill, pretraining_task, rules, same


@pytest.fixture
def bert() -> BertForMaskedLM:
    return fill(BertForMaskedLM(BertConfig(**SIZES)), 1)


def vl_bert(**fields) -> VLBertModel:
    torch.manual_seed(2)
    return VLBertModel(PretrainedVLBertConfig(**{**SIZES, "feature_dim": 8, "geometry_dim": 8, **fields}))


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


def save_wrapped(bert: BertForMaskedLM, folder: Path) -> Path:
    """As a module of Lightning that `torch.compile` has wrapped."""
    path = save_new(bert, folder) / "model.safetensors"
    state = load_file(path)
    save_file({f"model._orig_mod.{name}": value for name, value in state.items()}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("save", [save_old, save_new, save_wrapped])
def test_encoder_and_word_head_start_from_bert(tmp_path, bert, save):
    path = save(bert, tmp_path / "bert")
    encoder = vl_bert(text_only_embedding=True)
    own = {name: value.clone() for name, value in encoder.state_dict().items()}
    report = load_encoder(encoder, path, rules("pretraining"))
    assert report.layout == "BERT" and report.missing
    new_parts = ("region", "end_embedding", "text_visual", "text_only")
    assert all(any(part in name for part in new_parts) for name in report.missing)
    assert all(torch.equal(encoder.state_dict()[name], own[name]) for name in report.missing)
    theirs, ours = bert.bert, encoder
    for a, b in (
        (theirs.embeddings.word_embeddings, ours.embeddings.word_embeddings),
        (theirs.embeddings.position_embeddings, ours.embeddings.position_embeddings),
        (theirs.embeddings.LayerNorm, ours.embeddings.norm),
        (theirs.encoder.layer[1].output.LayerNorm, ours.layers[1].output.LayerNorm),
        (theirs.encoder.layer[1].attention.self.value, ours.layers[1].attention.self.value),
    ):
        assert same(a, b)
    segments, given = ours.embeddings.segment_embeddings.weight, theirs.embeddings.token_type_embeddings.weight
    assert torch.equal(segments[:2], given) and not torch.equal(*given)  # only VL-BERT's pre-training copies the first
    assert torch.equal(segments[2], own["embeddings.segment_embeddings.weight"][2])

    task = pretraining_task(16, 40, {"masked_regions": {"classes": 5}})
    report = load_task(task, path, rules("pretraining"))
    assert all(name.startswith("masked_regions.") for name in report.missing)
    head = bert.cls.predictions
    assert torch.equal(task.word_head.transform["dense"].weight, head.transform.dense.weight)
    assert torch.equal(task.word_head.transform["norm"].bias, head.transform.LayerNorm.bias)
    assert torch.equal(task.word_head.bias, head.bias)


def test_the_pooler_comes_along_where_the_encoder_has_one(tmp_path, bert):
    folder = save_old(bert, tmp_path / "bert")
    encoder = vl_bert(with_pooler=True)
    load_encoder(encoder, folder, rules("vcr"))
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert torch.equal(encoder.pooler.dense.weight, state["bert.pooler.dense.weight"])
    assert "pooler.dense.weight" in load_encoder(vl_bert(), folder, rules("vcr")).unexpected


def test_heads_that_start_from_bert_and_heads_that_do_not(tmp_path, bert):
    folder = save_new(bert, tmp_path / "bert")
    task = VQATask(16, VQAConfig(answers=["yes", "no"]))
    report = load_task(task, folder, rules("vqa"))
    assert torch.equal(task.head.transform["dense"].weight, bert.cls.predictions.transform.dense.weight)
    assert report.missing == ["head.output.weight", "head.output.bias"] and report.unexpected == ["word_head.bias"]
    with pytest.raises(ValueError, match=r"model.safetensors.*refcoco"):
        load_task(ReferringTask(16), folder, rules("refcoco"))


def test_a_bert_without_a_head_has_names_without_a_prefix(tmp_path):
    plain = BertModel(BertConfig(**SIZES))
    plain.save_pretrained(tmp_path / "plain")
    encoder = vl_bert()
    load_encoder(encoder, tmp_path / "plain", rules("refcoco"))
    assert torch.equal(encoder.layers[0].output.dense.weight, plain.encoder.layer[0].output.dense.weight)
    with pytest.raises(ValueError, match=r"model.safetensors .*missing \(word_head.bias"):
        load_task(pretraining_task(16, 40, {}), tmp_path / "plain", rules("pretraining"))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"vocab_size": 41}, r"model.safetensors .*embeddings.word_embeddings.weight \[40, 16\] -> \[41, 16\]"),
        ({"num_hidden_layers": 3}, r"model.safetensors .*missing \(layers.2.attention"),
        ({"num_hidden_layers": 1}, r"model.safetensors .*unexpected \(layers.1.attention"),
        ({"num_attention_heads": 4}, r"config.json: num_attention_heads"),
    ],
)
def test_another_architecture_is_refused_as_a_whole(tmp_path, bert, fields, wrong):
    save_new(bert, tmp_path / "bert")
    encoder, untouched = vl_bert(**fields), vl_bert(**fields)
    with pytest.raises(ValueError, match=wrong):
        load_encoder(encoder, tmp_path / "bert", rules("refcoco"))
    assert same(encoder, untouched)


@pytest.mark.parametrize("name", ["bert.adapter.weight", "cls.predictions.decoder.weight"])
def test_strange_names_and_an_untied_decoder_are_named_with_the_file(tmp_path, bert, name):
    torch.save({**bert.state_dict(), name: torch.zeros(40, 16)}, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=rf"x.bin: .*{name.removeprefix('bert.')}"):
        load_encoder(vl_bert(), tmp_path / "x.bin", rules("refcoco"))


@pytest.mark.parametrize("name", ["missing.bin", "no/such/folder", "./bert"])
def test_a_path_to_nothing_never_reaches_for_the_network(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "cached_file", lambda *args, **options: pytest.fail("network"))
    with pytest.raises(FileNotFoundError, match=Path(name).name):
        load_encoder(vl_bert(), name, rules("refcoco"))


def test_a_hub_name_is_fetched_by_transformers(tmp_path, monkeypatch, bert):
    folder = save_new(bert, tmp_path / "cache")

    def cached_file(name: str, file: str, **_: object) -> str | None:
        if name != "org/bert-tiny":
            raise OSError("not reachable")
        return str(folder / file) if (folder / file).is_file() else None

    monkeypatch.setattr(loading, "cached_file", cached_file)
    encoder = vl_bert()
    load_encoder(encoder, "org/bert-tiny", rules("refcoco"))
    assert torch.equal(encoder.embeddings.word_embeddings.weight, bert.bert.embeddings.word_embeddings.weight)
    with pytest.raises(FileNotFoundError, match=r"bert-nano: .*\(not reachable\)"):
        load_encoder(vl_bert(), "bert-nano", rules("refcoco"))
