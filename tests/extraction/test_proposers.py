"""Boxes of transformers' object detectors: those of the library, with the class or the phrase of each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig

import e2e_vl
from detector.errors import MissingFileError, UserError
from e2e_vl.config import ProposalRule
from e2e_vl.extraction.proposers import Proposer, load_proposer
from tests.extraction.tiny_detectors import CLASSES, WITH_CLASSES, ZERO_SHOT, save_tiny_detector

PHRASES = ["red star", "the circle"]
ALL = ProposalRule(min_score=0.0, max_boxes=100, nms_threshold=1.0)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 110, 3), dtype=np.uint8))


def library_result(proposer: Proposer, image: Image.Image) -> dict:
    """What transformers itself says of an image."""
    text = {"text": [PHRASES]} if proposer.takes_text else {}
    encoded = proposer.processor(images=image, return_tensors="pt", **text)
    with torch.no_grad():
        output = proposer.network(**encoded)
    sizes = {"threshold": 0.0, "target_sizes": [(image.height, image.width)]}
    if proposer.takes_text:
        return proposer.processor.post_process_grounded_object_detection(output, **sizes)[0]
    return proposer.processor.post_process_object_detection(output, **sizes)[0]


@pytest.mark.parametrize("name", [*WITH_CLASSES, *ZERO_SHOT])
def test_boxes_and_scores_are_those_of_the_library(name: str, tmp_path: Path, image: Image.Image) -> None:
    proposer = load_proposer(save_tiny_detector(name, tmp_path))
    assert proposer.takes_text == (name in ZERO_SHOT)
    phrases = PHRASES if proposer.takes_text else ()
    proposals = proposer.propose(image, ALL, phrases)
    expected = library_result(proposer, image)
    best = int(expected["scores"].argmax())
    box = expected["boxes"][best].clip(torch.zeros(4), torch.tensor([110.0, 70.0, 110.0, 70.0]))
    assert proposals.boxes[0] == pytest.approx(box.numpy(), abs=1e-3)
    assert proposals.scores[0] == pytest.approx(float(expected["scores"][best]), abs=1e-5)
    assert (np.diff(proposals.scores) <= 0).all() and len(proposals.scores) == len(proposals.boxes) > 0
    names = PHRASES if proposer.takes_text else CLASSES
    assert proposals.text_labels == tuple(names[label] for label in proposals.labels)


def test_the_phrase_of_a_box_is_that_of_its_most_probable_wordpiece(tmp_path: Path, image: Image.Image) -> None:
    proposer = load_proposer(save_tiny_detector("grounding_dino", tmp_path))
    # [CLS] red star . the circle . [SEP], and what the network adds
    logits = torch.full((1, 3, 256), -torch.inf)
    logits[0, :, :8] = torch.tensor(
        [[9.0, 0, 2, 9, 1, 1, 9, 9], [0, 0, 0, 0, 0, 1, 0, 0], [5, -1, -2, 5, -3, -4, 5, 5]]
    )
    boxes = torch.tensor([[[0.2, 0.5, 0.2, 0.2], [0.5, 0.5, 0.2, 0.2], [0.8, 0.5, 0.2, 0.2]]])
    proposer.network.forward = lambda **_: SimpleNamespace(logits=logits, pred_boxes=boxes)
    proposals = proposer.propose(image, ALL, PHRASES)
    assert proposals.text_labels == ("red star", "the circle", "red star")
    assert proposals.scores == pytest.approx(torch.tensor([2.0, 1, -1]).sigmoid().numpy())
    assert proposals.boxes[1] == pytest.approx([44, 28, 66, 42])


def test_the_rule_keeps_the_best_boxes_of_each_place(tmp_path: Path, image: Image.Image) -> None:
    proposer = load_proposer(save_tiny_detector("rt_detr_v2", tmp_path))
    everything = proposer.propose(image, ALL)
    few = proposer.propose(image, ProposalRule(min_score=0.0, max_boxes=2, nms_threshold=0.5))
    assert few.boxes[0].tolist() == everything.boxes[0].tolist() and len(few.boxes) == 2
    [best] = proposer.propose(image, ProposalRule(min_score=0.99)).scores
    assert best == everything.scores[0], "one box stays, whatever its score"


def test_more_phrases_than_the_detector_reads_are_refused(tmp_path: Path, image: Image.Image) -> None:
    proposer = load_proposer(save_tiny_detector("grounding_dino", tmp_path))
    with pytest.raises(UserError, match="The 100 phrases are more than the 256 wordpieces"):
        proposer.propose(image, ALL, ["red star"] * 100)


def test_what_is_no_detector_or_cannot_be_reached_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a bert, which is no object detector"):
        load_proposer(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MissingFileError, match=r"someone/detector is neither a local folder .*; check the name and"):
        load_proposer("someone/detector")


def test_an_image_in_any_form_and_a_text_in_python(tmp_path: Path, image: Image.Image) -> None:
    save_tiny_detector("owl_v2", tmp_path / "model")
    proposer = e2e_vl.load_proposer(tmp_path / "model", "cpu")
    image.save(tmp_path / "photo.png")
    proposals = proposer(tmp_path / "photo.png", "red star", max_boxes=2)
    assert len(proposals.boxes) == 2 and set(proposals.text_labels) == {"red star"}
    np.testing.assert_array_equal(proposals.boxes, proposer(np.array(image), ["red star"], max_boxes=2).boxes)
    with pytest.raises(UserError, match="looks for phrases; give a text"):
        proposer(image)
    with pytest.raises(UserError, match="max_boxs"):
        proposer(image, "red star", max_boxs=2)
