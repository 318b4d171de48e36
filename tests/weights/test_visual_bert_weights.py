"""VisualBERT's files, official and transformers', in and out, and BERT as its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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
from e2e_vl.encoders.visual_bert import VisualBertEncoder, VisualBertEncoderConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import ADAPTERS
from e2e_vl.tasks.config import Flickr30KConfig, NLVR2Config, VCRConfig, VQAConfig
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.start import StartRules, load_encoder, load_task
from e2e_vl.weights.visual_bert import OfficialVisualBert, TransformersVisualBert, VisualBertFromBert, official_state
from tests.weights.starts import pretraining_task

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 20}
FEATURE_DIM = 8
NETWORK = {"R2C.FEATURE_DIM": 8, "R2C.MASK_CHANNELS": 4, "R2C.CLASS_DIM": 3, "ROI_HEADS.NUM_CLASSES": 5}
NETWORK |= {"RESNETS.NORM": "BN", "BACKBONE.FREEZE_AT": 0, "ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign"}
NETWORK |= {"ROI_BOX_HEAD.POOLER_RESOLUTION": 7, "PIXEL_MEAN": [123.675, 116.28, 103.53]}
NETWORK |= {"PIXEL_STD": [58.395, 57.12, 57.375]}
INPUT = {"INPUT.FORMAT": "RGB"}
HEADS = {"masked_words": 1.0, "relationship": 1.0, "masked_regions": 0.0, "masked_text": 0.0}
export_official, export_folder = OfficialVisualBert().export, TransformersVisualBert().export


def rules(task_name: str) -> StartRules:
    return StartRules(task_name, ADAPTERS["visual_bert"])


def make_encoder(**fields: Any) -> VisualBertEncoder:
    return VisualBertEncoder(VisualBertEncoderConfig(**{**SIZES, "feature_dim": FEATURE_DIM, **fields}))


def make_task(name: str) -> nn.Module:
    if name == "pretraining":
        return pretraining_task(SIZES["hidden_size"], SIZES["vocab_size"], HEADS)
    if name == "nlvr2":
        return NLVR2Task(SIZES["hidden_size"], NLVR2Config())
    if name == "vcr":
        return VCRTask(SIZES["hidden_size"], VCRConfig(region_loss_weight=0))
    if name == "flickr30k":
        return Flickr30KTask(SIZES["hidden_size"], Flickr30KConfig(head_size=8))
    return answers_task(7)


def answers_task(count: int) -> VQATask:
    answers = [str(number) for number in range(count)]
    config = VQAConfig(answers=answers, hidden_layer=False, initialise_from_words=False)
    return VQATask(SIZES["hidden_size"], config)


def make_model(task: nn.Module, seed: int = 1, **fields: Any) -> VisionLanguageModel:
    """All numbers are random, also those that start at 0 or 1 or as copies."""
    torch.manual_seed(seed)
    detector = PrecomputedDetector(DetectorConfig.from_flat({}))
    model = VisionLanguageModel(detector, make_encoder(**fields), task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape) + 0.1)
    return model


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def state_of(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)


# Official files


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["pretraining", "vqa", "vcr", "nlvr2", "flickr30k"])
def test_there_and_back_is_exact(tmp_path, name, late):
    model, other = (make_model(make_task(name), seed, bypass_transformer=late) for seed in (1, 2))
    path = tmp_path / "x.th"
    assert export_official(model, name, path) == []
    state = state_of(path)
    assert all(key.startswith("bert.") for key in state)
    assert any("additional_layer" in key for key in state) == late
    report = load_encoder(other.encoder, path, rules(name))
    assert report.is_complete and report.layout == "VisualBERT"
    assert same(other.encoder.state_dict(), model.encoder.state_dict())
    assert load_task(other.task, path, rules(name)).is_complete
    assert same(other.task.state_dict(), model.task.state_dict())
    parts = OfficialVisualBert().convert(state, path)
    assert parts.task_name == name
    assert same(official_state(parts)[0], state)


@pytest.mark.parametrize("count", [1, 2])
def test_a_head_of_one_or_two_answers_is_one_of_questions_where_a_run_of_questions_asks(tmp_path, count):
    model, other, path = make_model(answers_task(count)), answers_task(count), tmp_path / "x.th"
    export_official(model, "vqa", path)
    assert load_task(other, path, rules("vqa")).is_complete
    assert same(other.state_dict(), model.task.state_dict())
    with pytest.raises(ValueError, match="no rule says how the head of flickr30k starts"):
        load_task(make_task("flickr30k"), path, rules("flickr30k"))


def small_network(seed: int, **settings: Any) -> R2CNetwork:
    """With numbers of its own everywhere, counters of batches included."""
    flat = {f"MODEL.{key}": value for key, value in {**NETWORK, **settings}.items()} | INPUT
    torch.manual_seed(seed)
    network = R2CNetwork(DetectorConfig.from_flat(flat), NetworkSizes(4, (1, 1, 1, 1), (2, 4, 4, 8)))
    for value in network.state_dict().values():
        value.copy_(torch.randint(1, 9, value.shape))
    return network


def test_a_file_of_vcr_has_its_network_of_regions(tmp_path):
    model, path = make_model(make_task("vcr")), tmp_path / "x.th"
    model.detector = small_network(1)
    assert export_official(model, "vcr", path) == []
    state = state_of(path)
    assert sum(name.startswith("detector.") for name in state) == len(model.detector.state_dict())
    assert load_encoder(make_encoder(), path, rules("vcr")).is_complete
    other = small_network(2)
    report = load_checkpoint(other, path)
    assert report.is_complete and report.layout == "VisualBERT"
    assert same(other.state_dict(), model.detector.state_dict())


def test_a_network_with_other_settings_is_not_written(tmp_path):
    model = make_model(make_task("vcr"))
    model.detector = small_network(1, **{"ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2"})
    with pytest.raises(ValueError, match=r"x.th: the official code has .*POOLER_TYPE ROIAlign, this model"):
        export_official(model, "vcr", tmp_path / "x.th")


def test_heads_that_nothing_reads_are_left_out_of_flickr30k(tmp_path):
    model = make_model(make_task("pretraining"))
    export_official(model, "pretraining", tmp_path / "x.th")
    state = state_of(tmp_path / "x.th")
    state |= {f"bert.flickr_attention.{one}.bias": torch.rand(8) for one in ("query", "key", "value")}
    parts = OfficialVisualBert().convert(state, "x.th")
    assert parts.task_name == "flickr30k"
    assert parts.task.keys() == {"query.bias", "key.bias"}


def test_pre_training_lends_its_heads_and_keeps_its_segments(tmp_path):
    """Both segments were trained, other than in VL-BERT's pre-training."""
    export_official(make_model(make_task("pretraining")), "pretraining", tmp_path / "x.th")
    encoder = make_encoder()
    report = load_encoder(encoder, tmp_path / "x.th", rules("vcr"))
    assert report.is_complete and report.copied == []
    segments = state_of(tmp_path / "x.th")["bert.bert.embeddings.token_type_embeddings.weight"]
    assert torch.equal(encoder.embeddings.token_type_embeddings.weight, segments)


def test_objectives_without_an_official_head_are_left_out(tmp_path):
    task = pretraining_task(SIZES["hidden_size"], SIZES["vocab_size"], {"masked_words": 1.0, "masked_regions": 1.0})
    left_out = export_official(make_model(task), "pretraining", tmp_path / "x.th")
    assert left_out and all(name.startswith("task.masked_regions.") for name in left_out)
    assert "bert.cls.predictions.bias" in state_of(tmp_path / "x.th")
    assert "bert.cls.seq_relationship.bias" not in state_of(tmp_path / "x.th")


@pytest.mark.parametrize(
    ("task", "name", "fields", "message"),
    [
        ("vqa", "vqa", {"region_position": "paper"}, "x.th: such files have no encoder with region_position = paper"),
        ("vqa", "vqa", {"region_types": [1]}, r"no encoder with region_types = \[1\]"),
        ("vqa", "vqa", {"project_equal_sizes": False, "feature_dim": 16}, "all features are projected"),
        ("vqa", "refcoco", {}, "no official VisualBERT model for the task 'refcoco', only for pretraining, vqa,"),
        ("vqa", "pretraining", {}, "head for pretraining has word_head.bias, .*, which this model lacks"),
        ("pretraining", "vqa", {}, "head for vqa has head.output, which this model lacks"),
    ],
)
def test_what_the_official_code_does_not_have_is_not_written(tmp_path, task, name, fields, message):
    with pytest.raises(ValueError, match=message):
        export_official(make_model(make_task(task), **fields), name, tmp_path / "x.th")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bert.bert.embeddings.new.weight": (1,)}, "x.th: embeddings.new.weight is no name of a VisualBERT model"),
        ({"bert.new.weight": (1,)}, "x.th: new.weight is no name of a VisualBERT pretraining model"),
        ({"bert.cls.predictions.decoder.weight": (40, 16)}, "x.th: the decoder of words differs from"),
        ({"bert.bert.pooler.dense.bias": None}, r"x.th does not fit .*1 missing \(pooler.dense.bias\)"),
        ({"bert.bert.embeddings.projection.weight": (16, 9)}, r"visual_projection.weight \[16, 9\] -> \[16, 8\]"),
        ({"bert.bert.embeddings.projection.weight": (16, 14)}, "set encoder.config.with_box_numbers to true"),
        (
            {"bert.bert.additional_layer.output.dense.bias": (16,)},
            "late fusion; set encoder.config.bypass_transformer to true",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(tmp_path, change, message):
    export_official(make_model(make_task("pretraining")), "pretraining", tmp_path / "x.th")
    state = state_of(tmp_path / "x.th")
    for key, shape in change.items():
        state.pop(key, None)
        if shape is not None:
            state[key] = torch.rand(shape)
    torch.save(state, tmp_path / "x.th")
    encoder = make_encoder()
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_encoder(encoder, tmp_path / "x.th", rules("pretraining"))
    assert same(encoder.state_dict(), before)


# transformers


def load_in_transformers(architecture: type, folder: Path) -> nn.Module:
    """As `from_pretrained`, and nothing is missing or left over."""
    model, found = architecture.from_pretrained(folder, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


ARCHITECTURES = {
    "pretraining": VisualBertForPreTraining,
    "vqa": VisualBertForQuestionAnswering,
    "vcr": VisualBertForMultipleChoice,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_reads_a_folder_and_so_do_we(tmp_path, name):
    model, other = (make_model(make_task(name), seed) for seed in (1, 2))
    assert export_folder(model, name, tmp_path / "model.safetensors") == []
    theirs = load_in_transformers(ARCHITECTURES[name], tmp_path)
    assert same(dict(theirs.visual_bert.state_dict()), dict(model.encoder.state_dict()))
    assert theirs.config.pad_token_id is None and theirs.config.visual_embedding_dim == FEATURE_DIM
    if name == "pretraining":
        assert torch.equal(theirs.cls.predictions.decoder.weight, model.encoder.embeddings.word_embeddings.weight)
        assert torch.equal(theirs.cls.predictions.decoder.bias, model.task.word_head.bias)
        assert torch.equal(theirs.cls.seq_relationship.weight, model.task.relationship.head.weight)
    else:
        assert torch.equal(theirs.cls.weight, model.task.head.output.weight)
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        report = load_encoder(other.encoder, folder, rules(name))
        assert report.is_complete and report.layout == "transformers' VisualBERT"
        assert same(other.encoder.state_dict(), model.encoder.state_dict())
    if name == "pretraining":
        assert load_task(other.task, tmp_path / "again", rules(name)).is_complete
        assert same(other.task.state_dict(), model.task.state_dict())


def test_a_trunk_alone_has_our_names(tmp_path):
    model, other = make_model(ReferringTask(16)), make_encoder()
    left_out = export_folder(model, "refcoco", tmp_path / "model.safetensors")
    assert left_out == [f"task.{name}" for name in model.task.state_dict()]
    theirs = load_in_transformers(VisualBertModel, tmp_path)
    assert same(dict(theirs.state_dict()), dict(model.encoder.state_dict()))
    report = load_encoder(other, tmp_path, rules("refcoco"))
    assert report.is_complete and same(other.state_dict(), model.encoder.state_dict())


def test_files_of_old_versions_hold_indices_and_the_bias_twice(tmp_path):
    torch.manual_seed(1)
    config = VisualBertConfig(**SIZES, visual_embedding_dim=FEATURE_DIM)
    state = dict(VisualBertForPreTraining(config).state_dict())
    state["visual_bert.embeddings.position_ids"] = torch.arange(20)[None]
    assert {"cls.predictions.bias", "cls.predictions.decoder.bias"} <= state.keys()
    torch.save(state, tmp_path / "pytorch_model.bin")
    task = make_task("pretraining")
    assert load_encoder(make_encoder(), tmp_path, rules("pretraining")).is_complete
    assert load_task(task, tmp_path, rules("pretraining")).is_complete
    assert torch.equal(task.word_head.bias, state["cls.predictions.bias"])
    trunk = {name.removeprefix("visual_bert."): value for name, value in state.items() if name.startswith("visual_b")}
    torch.save(trunk, tmp_path / "pytorch_model.bin")
    assert load_encoder(make_encoder(), tmp_path, rules("pretraining")).is_complete
    torch.save({**state, "cls.predictions.decoder.bias": torch.ones(40)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"bin: cls.predictions.decoder.bias differs from cls.predictions.bias"):
        load_encoder(make_encoder(), tmp_path, rules("pretraining"))


def test_a_setting_that_no_shape_shows_is_compared(tmp_path):
    export_folder(make_model(make_task("vcr")), "vcr", tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"config.json: num_attention_heads is 2, .* is 4; set encoder.config.num_att"):
        load_encoder(make_encoder(num_attention_heads=4), tmp_path, rules("vcr"))


def test_what_transformers_cannot_compute_is_not_written(tmp_path):
    model = make_model(make_task("vcr"), bypass_transformer=True)
    with pytest.raises(ValueError, match=r"such files have no encoder with bypass_transformer = True"):
        export_folder(model, "vcr", tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


# BERT


@pytest.fixture
def bert(tmp_path) -> BertForPreTraining:
    torch.manual_seed(3)
    model = BertForPreTraining(BertConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape))
    model.save_pretrained(tmp_path / "bert")
    return model


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_the_encoder_starts_from_bert(tmp_path, bert, copied, late):
    encoder = make_encoder(special_visual_initialize=copied, bypass_transformer=late)
    own = {name: value.clone() for name, value in encoder.state_dict().items()}
    report = load_encoder(encoder, tmp_path / "bert", rules("pretraining"))
    theirs = bert.bert.state_dict()
    assert all(torch.equal(encoder.state_dict()[name], value) for name, value in theirs.items())
    tables = {
        "embeddings.visual_token_type_embeddings.weight": "embeddings.token_type_embeddings.weight",
        "embeddings.visual_position_embeddings.weight": "embeddings.position_embeddings.weight",
    }
    assert len(report.copied) == 2 * copied
    for visual, text in tables.items():
        assert torch.equal(encoder.state_dict()[visual], theirs[text] if copied else own[visual])
    missing = {name.split(".")[0] if "additional" in name else name.rpartition(".")[0] for name in report.missing}
    projection, layer = {"embeddings.visual_projection"}, {"additional_layer"} if late else set()
    assert missing == projection | layer | (set() if copied else {name.rpartition(".")[0] for name in tables})
    weights = [encoder.embeddings.position_embeddings.weight, encoder.embeddings.visual_position_embeddings.weight]
    assert weights[0].data_ptr() != weights[1].data_ptr()


def test_heads_of_bert(tmp_path, bert):
    task = make_task("pretraining")
    report = load_task(task, tmp_path / "bert", rules("pretraining"))
    assert torch.equal(task.word_head.transform["dense"].weight, bert.cls.predictions.transform.dense.weight)
    assert torch.equal(task.word_head.bias, bert.cls.predictions.bias)
    parts = VisualBertFromBert().convert(dict(bert.state_dict()), "bert")
    assert torch.equal(parts.task["relationship.head.weight"], bert.cls.seq_relationship.weight)
    assert parts.transferable == ("word_head.", "relationship.")
    assert report.copied == ["word_head -> word_head", "relationship -> relationship"] and not report.missing
    assert torch.equal(task.relationship.head.weight, bert.cls.seq_relationship.weight)  # as it is, although 1 = fits
    assert torch.equal(task.relationship.head.bias, bert.cls.seq_relationship.bias)


def test_every_adapter_takes_its_own_files_only(tmp_path, bert):
    """Our own encoder's names are BERT's and transformers' too, but no adapter is asked for its files."""
    model = make_model(make_task("vqa"))
    export_official(model, "vqa", tmp_path / "x.th")
    export_folder(model, "vqa", tmp_path / "folder" / "model.safetensors")
    files = [state_of(tmp_path / "x.th"), load_file(tmp_path / "folder" / "model.safetensors"), bert.state_dict()]
    adapters = ADAPTERS["visual_bert"]
    assert [[adapter.recognise(tensors) for adapter in adapters] for tensors in files] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
    assert not any(adapter.recognise(model.encoder.state_dict()) for adapter in adapters)
    model.encoder.save_pretrained(tmp_path / "own")
    encoder = make_encoder()
    report = load_encoder(encoder, tmp_path / "own", rules("vqa"))
    assert report.is_complete and report.layout == "this project"
    assert same(encoder.state_dict(), model.encoder.state_dict())
