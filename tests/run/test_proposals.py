"""Training on boxes of a file with their scores: the regions read them, and the detector learns through the boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import e2e_vl
from detector.errors import UserError
from e2e_vl.config import RunConfig
from e2e_vl.data.image_loader import read_detections
from e2e_vl.run.build import build_run, resolve_config
from e2e_vl.run.train import train
from tests.run.runs import first_texts, predictions_of

pytestmark = pytest.mark.usefixtures("on_cpu")
WORDS = (
    "encoder.config.proposal_scores=true",
    "data.boxes={train: detections, selection: {min_score: 0, min_regions: 0, max_regions: 20}}",
    "detector.loss_weight=0",
    "eval={boxes: [detections], report_pictures: 0, every_epochs: 0}",
)


def detections_of(config: RunConfig) -> dict:
    return read_detections(Path(config.data.root) / config.data.files["detections"])


def test_regions_have_the_scores_and_classes_of_the_file(tiny_config):
    config = tiny_config(*WORDS)
    run = build_run(config)
    batch = first_texts(run, 2, 2)
    output = run.model(batch)
    regions = output.text_regions
    records = detections_of(config)
    for text, record in enumerate(batch.records):
        detections = records[str(record["image_id"])]
        best_first = np.argsort(-detections.scores, kind="stable")
        is_candidate = regions.row[text] >= 0
        proposals = regions.proposals[text][is_candidate]
        assert proposals[:, 0].tolist() == [1] * len(best_first)
        assert proposals[:, 1].numpy() == pytest.approx(detections.scores[best_first])
        words = set(record["text"].split())
        is_named = [detections.phrases[row] in words for row in best_first]
        assert (proposals[:, 2] == 1).tolist() == is_named
        assert not regions.proposals[text][~is_candidate].any()
    output.task.losses["referring"].mean.backward()
    assert run.model.encoder.proposal_embedding.weight.grad.abs().sum(dim=0).all()
    assert all(parameter.grad is not None for parameter in run.model.detector.roi_heads.res5.parameters())


def test_questions_with_scores_have_the_answers_of_the_evaluation(tiny_config):
    config = tiny_config(*WORDS, "train={max_steps: 3, lr: 0.1, trackers: []}")
    train(config)
    model = e2e_vl.load(config.output, device="cpu")
    assert model.network.encoder.proposal_embedding.weight.any()
    file = Path(config.data.root) / config.data.files["detections"]
    records = detections_of(config)
    without_scores = []
    for record in predictions_of(Path(config.output), "val_detections")[:6]:
        detections = records[str(record["image_id"])]
        image, text = record["file_name"], record["text"]
        answer = model.ask(image, text, boxes=detections.boxes, scores=detections.scores, names=detections.phrases)
        assert answer.score == pytest.approx(record["score"], abs=1e-5)
        assert model.ask(image, text, boxes=file).score == pytest.approx(answer.score, abs=1e-5)
        with pytest.warns(UserWarning, match="The boxes have no scores, but"):
            without_scores.append(model.ask(image, text, boxes=detections.boxes).score != answer.score)
    assert any(without_scores)


@pytest.mark.parametrize("boxes", ["gt", "detections+gt"])
def test_annotated_boxes_have_no_scores_to_train_on(tiny_config, boxes):
    config = tiny_config(*WORDS, f"data.boxes.train={boxes}")
    with pytest.raises(UserError, match="but annotated boxes have no scores"):
        resolve_config(config)
