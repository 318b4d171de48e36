"""From images to regions: the rules, which features belong to the boxes, single images, and how a detector is found."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from detector.boxes import is_larger, pairwise_iou
from detector.config import DetectorConfig, SelectionRule
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule
from e2e_vl.config import ExtractionSettings, save_config
from e2e_vl.data.features import RegionFeatures, open_features
from e2e_vl.data.user_inputs import list_images
from e2e_vl.extraction.bulk import ExtractionJob, extract_images
from e2e_vl.extraction.regions import (
    MAX_CANDIDATES,
    SAME_PLACE,
    InputImage,
    RegionExtractor,
    detector_of_run,
    extract_image,
    open_detector,
    select_candidate_pairs,
)
from e2e_vl.run.launch import make_accelerator
from tests.data.helpers import refused
from tests.extraction.conftest import network_input
from tests.weights.starts import replaced, same

pytestmark = pytest.mark.usefixtures("on_cpu")
RULE = SelectionRule(0.9, 12, 20)


def test_features_of_the_proposal_with_a_refined_box(source, input_of):
    """The boxes are the boxes of "final"; the features are not."""
    numbers, image = SelectionRule(0.0, 5, 5), input_of("0")
    final, proposal = (
        RegionExtractor(source.detector, ExtractionSettings("maxnms", numbers, of))([image])[0]
        for of in ("final", "proposal")
    )
    assert np.array_equal(final.boxes, proposal.boxes) and np.array_equal(final.classes, proposal.classes)
    assert not np.allclose(final.features, proposal.features, atol=1e-3)
    images = network_input(source, image)
    maps = source.detector.features(images)
    generator = source.detector.proposal_generator
    boxes = generator.propose(generator(maps), [tuple(images.sizes[0].tolist())]).boxes[0]
    with torch.no_grad():
        all_features = source.detector(images, [boxes]).features[0].numpy()
    for row in proposal.features:
        assert np.abs(all_features - row).max(axis=1).min() < 1e-4


def by_score(detector: FasterRCNN, image: InputImage, rule: SelectionRule) -> RegionFeatures:
    return RegionExtractor(detector, ExtractionSettings("score", rule))([image])[0]


def test_the_score_rule(source, input_of):
    every = by_score(source.detector, input_of("0"), SelectionRule(0.0, 0, 100))
    overlap = pairwise_iou(every.boxes, every.boxes) - np.eye(len(every))
    assert len(every) > 8 and overlap.max() < SAME_PLACE + 1e-3
    assert (np.diff(every.scores) <= 0).all()
    middle = float(every.scores[4])
    some = by_score(source.detector, input_of("0"), SelectionRule(middle, 2, 100))
    assert np.array_equal(some.boxes, every.boxes[every.scores >= middle])


def changed(detector: FasterRCNN, settings: dict[str, object]) -> FasterRCNN:
    """The same weights under other settings."""
    other = FasterRCNN(DetectorConfig.from_flat(detector.config.to_flat() | settings)).eval()
    other.load_state_dict(detector.state_dict())
    return other


def test_the_score_rule_keeps_what_the_detector_itself_detects(source, input_of):
    """The detections of `Detector.forward` (Detectron2's test-time rule) without boxes of no area and same places."""
    changes = {"MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0, "TEST.DETECTIONS_PER_IMAGE": 100}
    detector = changed(source.detector, changes)
    image = input_of("2")
    with torch.no_grad():
        found = detector(network_input(source, image))
    scores, boxes = found.scores[0].numpy(), found.boxes[0].numpy()
    distinct: list[int] = []
    for row in np.flatnonzero(is_larger(boxes)):
        if not distinct or pairwise_iou(boxes[row : row + 1], boxes[distinct]).max() <= SAME_PLACE:
            distinct.append(int(row))
    expected = distinct[:6]
    assert len(expected) == 6
    regions = by_score(detector, image, SelectionRule(0.0, 6, 6))
    assert np.array_equal(regions.scores, scores[expected])
    assert np.array_equal(regions.classes, found.classes[0].numpy()[expected])
    assert np.allclose(regions.features, found.features[0].numpy()[expected], atol=1e-5)


def test_sure_proposals_with_many_classes_leave_room_for_the_others():
    """Three proposals alone have more pairs than are looked at; the others come in with their best class."""
    probs = torch.full((20, 2000), 1e-9)
    probs[:3] = 1e-4
    probs[:3, 0] = 2e-4
    probs[3:, 7] = 1e-5
    rows, classes = select_candidate_pairs(probs)
    assert MAX_CANDIDATES < 3 * 2000 and len(rows) == MAX_CANDIDATES + 17
    assert rows.unique().tolist() == list(range(20)) and (classes[rows >= 3] == 7).all()


def test_a_detector_without_attributes():
    bare = FasterRCNN(DetectorConfig.from_flat({"MODEL.RESNETS.DEPTH": 18, "MODEL.RESNETS.RES2_OUT_CHANNELS": 8}))
    with refused("attribute head"):
        RegionExtractor(bare, ExtractionSettings("score", attributes=True))


@pytest.mark.parametrize("features_of", ["final", "proposal"])
def test_one_image_has_the_regions_of_bulk_extraction(source, folder: Path, tmp_path: Path, features_of):
    detector = changed(source.detector, {"MODEL.ROI_HEADS.FEATURES_OF": features_of})
    source = dataclasses.replace(source, detector=detector)
    settings = ExtractionSettings("score", RULE, features_of)
    job = ExtractionJob(list_images(folder), tmp_path / "out", "npz", source, settings, batch_size=1, workers=0)
    extract_images(job, make_accelerator("no"))
    store = open_features(job.output)
    for record in map(store.read, store.ids):
        single = extract_image(folder / f"{record.image_id}.png", source, RULE)
        assert single.image_id == record.image_id
        for name, column in record.columns().items():
            assert np.array_equal(getattr(single, name), column), name


def test_limit_of_proposals(config_file: Path, folder: Path):
    source = open_detector(config_file, None, max_proposals=4)
    assert 0 < len(extract_image(folder / "0.png", source, SelectionRule(0.0, 0, 36))) <= 4
    assert source.detector.config.rpn.post_nms_topk_test == 4


def test_detector_of_a_run(trained_run, tmp_path: Path):
    folder = shutil.copytree(trained_run.path / "model", tmp_path / "run" / "model")
    sizes = {"short_edge": [48, 64], "long_edge": 80, "rounding": "truncate"}
    save_config(replaced(trained_run.config, data={"resize": sizes}), folder / "config.yaml")
    for path in (tmp_path / "run", folder):
        source = detector_of_run(path)
        assert source.resize == ResizeRule(64, 80, "truncate")
        assert source.weights == folder / "detector" / "model.safetensors"
        assert same(source.detector, trained_run.model.detector)
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        detector_of_run(tmp_path)
