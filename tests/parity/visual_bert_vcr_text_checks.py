"""VCR's texts, places of named objects, boxes and pictures against rules recorded from the official VisualBERT code.

The settings are the shipped ones, configs/vcr/visual_bert_q2a.yaml.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from detector.config import DetectorConfig
from detector.images import ResizeRule
from detector.r2c import NetworkSizes, R2CNetwork
from detector.structures import ImageBatch
from e2e_vl.config import DataConfig, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.base import DataFiles, DataNeeds
from e2e_vl.data.config import VCRDatasetConfig
from e2e_vl.data.image_loader import instance_mask
from e2e_vl.data.vcr import VCRDataset, find_relevant_objects
from e2e_vl.encoders.visual_bert import VisualBertEncoder
from e2e_vl.preprocessing import EncodedText
from e2e_vl.samples import AnnotatedObjects, ChoiceText, CorrectChoice, SampleImage
from e2e_vl.tasks.vcr import Piece, VCRTask, sentence_words, truncate_choices
from e2e_vl.text import TextTokenizer
from tests.parity import visual_bert_common as common
from tests.parity.visual_bert_common import part_of
from tests.tasks.preprocessors import preprocess, sample_of, tokens

visual_golden = common.visual_golden
data_rules, rules_tokenizer = common.data_rules, common.rules_tokenizer
ROOT = Path(__file__).parents[2]
KINDS = ("answer", "rationale")


@pytest.fixture(scope="module")
def settings() -> RunConfig:
    return load_config(ROOT / "configs/vcr/visual_bert_q2a.yaml", ["data.root=DATA"])


def texts_of(data_rules, rules_tokenizer, settings, kind: str) -> list[EncodedText]:
    item, boxes = part_of(data_rules, "vcr", "item"), part_of(data_rules, "vcr", "boxes_used")
    is_answer = kind == "answer"
    query = [item["question"]] if is_answer else [item["question"], item["answer_choices"][item["answer_label"]]]
    label = item["answer_label" if is_answer else "rationale_label"]
    choices = item["answer_choices" if is_answer else "rationale_choices"]
    text = ChoiceText(0, "", {}, CorrectChoice(label), query=tuple(query), choices=tuple(choices))
    number = len(item["objects"])
    corners = np.tile([0.0, 0.0, 9.0, 9.0], (number, 1))
    objects = AnnotatedObjects(corners, "recorded", names=tuple(item["objects"]))
    image = SampleImage("7", Path("photo.jpg"), objects=objects, candidates=tuple(boxes))
    config = settings.task.config
    preprocessor = VCRTask(8, config).preprocessor(
        TextTokenizer(rules_tokenizer, VisualBertEncoder.layout, training=True)
    )
    return preprocess(preprocessor, sample_of(text, image=image), epoch=3)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_places_of_named_objects(data_rules, rules_tokenizer, settings, kind):
    found = texts_of(data_rules, rules_tokenizer, settings, kind)
    theirs = part_of(data_rules, "vcr", "alignment", kind)
    assert len(found) == len(theirs)
    for ours, one in zip(found, theirs, strict=True):
        assert tokens(ours, rules_tokenizer) == one["tokens"]
        assert ours.encoding.input_ids.tolist() == one["input_ids"]
        assert ours.encoding.token_type_ids.tolist() == one["token_type_ids"]
        assert bool(ours.targets.is_correct) == one["is_correct"]
        whole, *rows = one["positions"]
        named = ours.region_of_token
        assert whole == []
        assert [np.flatnonzero(named == row).tolist() for row in range(len(rows))] == rows


@pytest.mark.parametrize("kind", KINDS)
def test_people_have_recorded_names(data_rules, rules_tokenizer, settings, kind):
    found = texts_of(data_rules, rules_tokenizer, settings, kind)[0].record
    said = part_of(data_rules, "vcr", kind)
    assert found["text"] == " ".join(said["context"])
    assert found["choices"] == [" ".join(word for word, _ in sentence_words(choice, [])) for choice in said["choices"]]


def test_boxes_of_all_texts(data_rules):
    item = part_of(data_rules, "vcr", "item")
    sentences = [item["question"], *item["answer_choices"], *item["rationale_choices"]]
    assert list(find_relevant_objects(item["objects"], sentences)) == part_of(data_rules, "vcr", "boxes_used")


@pytest.mark.parametrize(("kind", "objects"), [("answer", "r2c_all_texts"), ("answer", "r2c"), ("rationale", "r2c")])
def test_boxes_of_a_question(data_rules, tmp_path, kind, objects):
    """`add_all_features` off is "r2c"."""
    item = part_of(data_rules, "vcr", "item")
    line = {**item, "annot_id": "val-0", "img_fn": "a.png", "metadata_fn": "a.json", "movie": "film"}
    (tmp_path / "val.jsonl").write_text(json.dumps(line) + "\n")
    names = tuple(dict.fromkeys(item["objects"]))
    options = VCRDatasetConfig(question=kind, objects=objects, class_names=names)
    files = {"images": ".", "questions": "val.jsonl"}
    settings = DataConfig(name="vcr", root=str(tmp_path), files=files)
    dataset = VCRDataset(DataFiles(settings, VCRDataset.file_keys), options, "val", DataNeeds())
    [group] = dataset.groups
    corners = [[0, 0, 9, 9, 0.9]] * len(item["objects"])
    (tmp_path / "a.json").write_text(
        json.dumps(
            {
                "boxes": corners,
                "segms": [[[[0, 0], [9, 0], [9, 9]]]] * len(corners),
                "names": item["objects"],
                "width": 100,
                "height": 60,
            }
        )
    )
    keys = ("boxes_used",) if objects == "r2c_all_texts" else ("add_all_features_off", kind)
    expected = part_of(data_rules, "vcr", *keys)
    assert list(dataset.sample(group).images[0].candidates) == expected


def test_the_choice_alone_is_cut(data_rules):
    for case in part_of(data_rules, "truncate_vcr"):
        front = [Piece(number, -1, number) for number in range(case["len_a"])]
        choice = [Piece(number, -1, number) for number in range(case["len_b"])]
        truncate_choices(front, [choice], case["max_seq_length"] - 3)
        assert len(front) == case["kept_a"] and case["first_a"] == 0
        assert [piece.id for piece in choice] == list(range(case["len_b"]))[case["len_b"] - case["kept_b"] :]
        assert case["first_b"] == (choice[0].id if choice else None)


def test_images_on_their_canvas(data_rules, settings):
    resize = settings.data.resize
    rule = ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding)
    config = DetectorConfig.from_yaml(ROOT / "configs/detector/r2c_R_50.yaml")
    network = R2CNetwork(config, NetworkSizes(8, (1, 1, 1, 1), (8, 8, 8, 8))).eval()
    black = torch.tensor([-m / s for m, s in zip(config.input.pixel_mean, config.input.pixel_std, strict=True)])
    for case in part_of(data_rules, "vcr_image"):
        left, top, right, bottom = case["window"]
        size = (bottom - top, right - left)
        assert rule.target_size(case["height"], case["width"]) == size
        sizes = torch.tensor([size])
        pixels, shift = network.place_on_canvas(ImageBatch(torch.ones(1, 3, *size), sizes, sizes, ["image"]))
        assert list(pixels.shape[:1:-1]) == case["result"]
        assert shift.tolist() == [[left, top]]
        assert (pixels[0, :, top:bottom, left:right] == 1).all()
        outside = torch.ones(pixels.shape[2:], dtype=torch.bool)
        outside[top:bottom, left:right] = False
        assert torch.equal(pixels[0][:, outside], black[:, None].expand(3, int(outside.sum())))


def test_masks_of_objects(data_rules, settings):
    case = part_of(data_rules, "vcr_mask")
    outlines = [np.array(polygon) for polygon in case["polygons"]]
    at = settings.task.config.mask_at
    mask = instance_mask(outlines, np.array(case["box"][:4]), len(case["mask"]), at)
    np.testing.assert_array_equal(mask, np.array(case["mask"]))


def test_the_shipped_settings_are_the_recorded_ones(settings):
    network = DetectorConfig.from_yaml(ROOT / "configs/detector/r2c_R_50.yaml")
    assert network.map_size == VCRTask(8, settings.task.config).instance_masks.size
    second = load_config(ROOT / "configs/vcr/visual_bert_qa2r.yaml", ["data.root=DATA"])
    assert (settings.train.epochs, second.train.epochs) == (8, 12)
    assert msgspec.structs.replace(second.train, epochs=settings.train.epochs) == settings.train
