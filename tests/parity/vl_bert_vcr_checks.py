"""VCR's texts, instance masks, model and losses against arrays recorded from the official VL-BERT code."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from detector.faster_rcnn import FasterRCNN
from detector.structures import ImageBatch
from e2e_vl.data.batching import pad_texts
from e2e_vl.data.image_loader import instance_mask
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.preprocessing import EncodedText
from e2e_vl.structures import Batch, RegionLabels
from e2e_vl.tasks.config import NEUTRAL_NAMES, VCRConfig
from e2e_vl.tasks.vcr import CHOICES, VCRTargets, VCRTask, encode_sentence, name_objects
from tests.parity.vl_bert_common import (
    RELATIVE,
    STAGES,
    Golden,
    SpecialTokens,
    assert_gradients_near,
    assert_near,
    detector_config,
    encoder_config,
    recorded_texts,
)

HEADS = {
    "final_mlp.1.": "head.output.",
    "cnn_loss_reg.0.dense.": "region_classifier.transform.dense.",
    "cnn_loss_reg.2.": "region_classifier.output.",
}


@pytest.fixture(scope="module")
def folder(golden_root: Path) -> Path:
    return golden_root / "vl_bert"


@pytest.fixture(scope="module")
def meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def data(folder: Path) -> dict:
    return json.loads((folder / "data.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def vcr(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "vcr.safetensors")


def part(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def official_key(name: str) -> str:
    """VCR wraps the encoder: vlbert._module.X is vlbert.X elsewhere."""
    return name.replace("vlbert._module.", "vlbert.")


def task_key(name: str) -> str | None:
    for theirs, ours in HEADS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None


def our_key(name: str, keys: ModuleType) -> str:
    ours = task_key(name)
    return f"task.{ours}" if ours else keys.our_key(official_key(name))


def make_model(meta: dict, folder: Path, vcr: dict[str, Tensor], keys: ModuleType, loss: str | None = None):
    """`loss` overrides the recorded one."""
    golden, network = Golden(folder), meta["configs"]["vcr"]
    encoder = encoder_config(golden, "vcr")
    classes = len(vcr["state.cnn_loss_reg.2.bias"])
    config = VCRConfig(
        dropout=network["CLASSIFIER_DROPOUT"],
        loss=loss or ("sigmoid" if network["CLASSIFIER_SIGMOID"] else "softmax"),
        region_loss_weight=network["CNN_LOSS_WEIGHT"],
        num_classes=classes,
        region_dropout=network["CNN_REG_DROPOUT"],
    )
    model = VisionLanguageModel(
        FasterRCNN(detector_config(golden, "vcr")), VLBertModel(encoder), VCRTask(encoder.hidden_size, config)
    )
    trunk = keys.split_state({official_key(k): v for k, v in load_file(folder / "trunk.safetensors").items()})
    missing, unexpected = model.detector.load_state_dict(trunk["detector"], strict=False)
    assert not unexpected
    assert all(key.startswith(("proposal_generator.", "roi_heads.box_predictor.")) for key in missing)
    model.encoder.load_state_dict(trunk["encoder"], strict=True)
    model.task.load_state_dict({task_key(k): v for k, v in part(vcr, "state.").items()}, strict=True)
    for number in network["IMAGE_FROZEN_BACKBONE_STAGES"]:  # FREEZE_AT knows no gaps
        model.detector.get_submodule(STAGES[number - 1]).requires_grad_(False)
    return model.eval()


def joined(query: Tensor, choice: Tensor, special: SpecialTokens) -> EncodedText:
    """A question and one of its choices, both int64 [L, 3]: wordpiece (-1 = padding), row of the box it names, word."""
    pieces = [rows[rows[:, 0] >= 0] for rows in (query, choice)]
    encoding = special.fill_template(VLBertModel.layout.pair, *(rows[:, 0].tolist() for rows in pieces))
    rows = torch.cat(pieces)[:, 1] - 1  # row 0 is the whole image
    return EncodedText(encoding, (0,), {}, region_of_token=encoding.place(rows.tolist()))


def make_batch(vcr: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Batch:
    """The recorded images, boxes and sentences. Row 0 of the boxes, the whole image, is left to the detector."""
    inputs = part(vcr, "in.")
    special = SpecialTokens.of(recorded_texts(part(vcr, "vlbert_in.")))
    texts = [
        joined(question, choice, special)
        for question, choices in zip(inputs["question"], inputs["answer_choices"], strict=True)
        for choice in choices
    ]
    number, choices = inputs["answer_choices"].shape[:2]
    kept = [rows[:, 3] > -0.5 for rows in inputs["boxes"]]
    boxes = [rows[real][1:] for rows, real in zip(inputs["boxes"], kept, strict=True)]
    sizes = inputs["im_info"][:, [1, 0]]
    ratios = inputs["im_info"][:, [3, 2]]
    return Batch(
        images=ImageBatch(
            inputs["image"].to(dtype), sizes.long(), sizes / ratios, [f"image {n}" for n in range(number)]
        ),
        boxes=[rows[:, :4].to(dtype) for rows in boxes],
        texts=pad_texts(texts),
        image_index=torch.arange(number).repeat_interleave(choices)[:, None],
        targets=VCRTargets(torch.nn.functional.one_hot(inputs["answer_label"], choices).flatten().to(dtype)),
        roi_masks=[rows[real][1:].to(dtype) for rows, real in zip(inputs["masks"], kept, strict=True)],
        region_labels=RegionLabels(classes=[rows[:, -1].long() - 1 for rows in boxes]),  # recorded: 0 = whole image
    )


def test_vcr_texts_of_choices(vcr):
    batch, recorded = make_batch(vcr), part(vcr, "vlbert_in.")
    mask = recorded["text_mask"]
    assert torch.equal(batch.texts.attention_mask, mask)
    assert torch.equal(batch.texts.input_ids[mask], recorded["text_input_ids"][mask])
    assert torch.equal(batch.texts.token_type_ids[mask], recorded["text_token_type_ids"][mask])


def test_vcr_inputs_logits_and_losses(meta, folder, vcr, vl_bert_keys):
    model, batch = make_model(meta, folder, vcr, vl_bert_keys), make_batch(vcr)
    with torch.no_grad():
        output = model(batch)
        vectors = model.encoder.embeddings.region_vectors(output.text_regions)
        words = model.encoder.embeddings.word_vectors(batch.texts, vectors, output.text_regions)
    mask, real = vcr["vlbert_in.object_mask"], vcr["vlbert_in.text_mask"]
    assert torch.equal(output.text_regions.attention_mask, mask)
    size = model.encoder.config.visual_size
    assert_near(vectors[mask], vcr["vlbert_in.object_vl_embeddings"][mask][:, :size], "region vectors")
    assert_near(words[real], vcr["vlbert_in.text_visual_embeddings"][real], "word vectors")
    assert_near(output.task.logits, vcr["out.label_logits"], "label_logits")
    assert_near(output.losses["choice"].mean, vcr["out.ans_loss"], "ans_loss")
    weight = meta["configs"]["vcr"]["CNN_LOSS_WEIGHT"]  # the recorded loss is not weighted yet
    expected = weight * vcr["out.cnn_regularization_loss"]
    assert_near(output.losses["region_class"].mean, expected, "cnn_regularization_loss")
    assert_near(sum(loss.mean for loss in output.losses.values()), vcr["out.loss"], "loss")
    for name, key, factor in (("ans_loss", "choice", 1.0), ("cnn_regularization_loss", "region_class", weight)):
        recorded = factor * meta["values"]["vcr"][name]
        assert float(output.losses[key].mean) == pytest.approx(recorded, rel=RELATIVE)


def test_vcr_softmax_loss(meta, folder, vcr, vl_bert_keys):
    model = make_model(meta, folder, vcr, vl_bert_keys, loss="softmax")
    with torch.no_grad():
        output = model(make_batch(vcr))
    assert_near(output.losses["choice"].mean, vcr["out.softmax_ans_loss"], "softmax_ans_loss")


def test_vcr_gradients(meta, folder, vcr, vl_bert_keys):
    """All gradients in float64: those recorded in float64 for the CNN, and the float32 ones of everything behind it."""
    model = make_model(meta, folder, vcr, vl_bert_keys).double()
    losses = model(make_batch(vcr, torch.float64)).losses
    sum(loss.mean for loss in losses.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert part(vcr, "grad64.")
    assert_gradients_near(Golden(folder), "vcr", gradients, lambda name: our_key(name, vl_bert_keys))
    assert not set(gradients) & {our_key(name, vl_bert_keys) for name in meta["no_grad_params"]["vcr"]}


def test_vcr_predictions(meta, folder, vcr, vl_bert_keys):
    model, batch = make_model(meta, folder, vcr, vl_bert_keys), make_batch(vcr)
    batch.records = [{"text_index": row // CHOICES, "label": 0} for row in range(len(batch))]
    with torch.no_grad():
        predictions = model.task.predict(model(batch))
    assert [one.text_index for one in predictions] == list(range(len(vcr["out.label_logits"])))
    assert [one.choice for one in predictions] == vcr["out.label_logits"].argmax(dim=1).tolist()
    ours = torch.tensor([one.probabilities for one in predictions])
    assert_near(ours, vcr["out.label_logits"].softmax(dim=1), "probabilities")


class RecordedPieces:
    """Stands for the tokenizer: splits each word into as many wordpieces as recorded, with their ids."""

    def __init__(self, words: list[str], ids: list[list[int]]) -> None:
        self.ids: dict[str, list[int]] = {}
        for word, pieces in zip(words, ids, strict=True):
            assert self.ids.setdefault(word, pieces) == pieces

    def tokenize(self, word: str) -> list[tuple[str, int]]:
        return [(word, number) for number in range(len(self.ids[word]))]

    def convert_tokens_to_ids(self, pieces: list[tuple[str, int]]) -> list[int]:
        return [self.ids[word][number] for word, number in pieces]


def test_vcr_names_and_wordpieces(data):
    """Recorded: wordpieces with the row of the box they name (0 = the whole image) and the number of the word."""
    recorded = data["vcr_text"]
    names, words = recorded["object_names"], []
    for token in recorded["tokens"]:
        if isinstance(token, str):
            words.append(token)
            continue
        for position, number in enumerate(token):
            words += ["and"] * bool(position) + [names[number]]
    ids: list[list[int]] = [[] for _ in words]
    for index, _, word in recorded["ids_tags_wordindex"]:
        ids[word].append(index)
    pieces = encode_sentence(recorded["tokens"], names, range(len(names)), RecordedPieces(words, ids))
    assert [[piece.id, piece.row + 1, piece.word] for piece in pieces] == recorded["ids_tags_wordindex"]


def test_vcr_people_are_named_in_turn(data):
    recorded = data["vcr_text"]["object_names"]
    assert set(recorded) & set(NEUTRAL_NAMES)
    assert name_objects(["person" if name in NEUTRAL_NAMES else name for name in recorded]) == recorded


def test_vcr_instance_mask(folder, data):
    recorded = load_file(folder / "data.safetensors")["vcr.instance_mask"].numpy()
    case = data["vcr_instance_mask"]
    outlines = [np.array(polygon) for polygon in case["polygons"]]
    np.testing.assert_array_equal(instance_mask(outlines, np.array(case["box"]), len(recorded)), recorded)
