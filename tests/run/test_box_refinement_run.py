"""Box refinement in whole runs: from the settings to refined answers, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import e2e_vl
from e2e_vl.run.build import build_model, build_run
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train
from e2e_vl.tasks.box_refinement import REFINEMENT
from tests.run.runs import SHORT, first_texts, logged, predictions_of
from tests.weights.starts import replaced

ON = "box_refinement={weight: 0.5, loss: giou}"
DETECTIONS = ("data.boxes.train=detections", "eval.boxes=[detections]")

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_the_loss_reaches_the_backbone(tiny_config):
    torch.manual_seed(0)
    run = build_run(tiny_config(ON, "data.boxes.train=detections", "detector.loss_weight=0"))
    loss = run.model(first_texts(run, 2)).losses[REFINEMENT]
    assert loss.count > 0
    loss.mean.backward()
    assert next(run.model.detector.backbone.parameters()).grad.any()
    assert run.model.encoder.embeddings.word_embeddings.weight.grad.any()


def test_a_run_answers_with_refined_boxes_and_is_loaded_again(tiny_config, trained_run, tmp_path):
    config = tiny_config(ON, *SHORT, *DETECTIONS, "eval.report_pictures=1", "phrases={weight: 1.0, layer: 1, size: 8}")
    metrics = train(config)
    run = Path(config.output)
    lines = logged(run)
    assert all(line[REFINEMENT] > 0 for line in lines)
    names = ("accuracy_75", "proposal_accuracy_90", "ceiling_75", "mean_iou", "phrase_mean_iou", "phrase_ceiling")
    assert all(0 <= metrics[f"val/{name}_detected_boxes"] <= 1 for name in names)
    for record in predictions_of(run, "val_detections"):
        row = record["candidate_boxes"].index(record["proposal"])
        assert record["refined_boxes"][row] == record["box"]
        assert all("proposal" in phrase for phrase in record["grounded"])

    state = load_model(run)[1].state_dict()
    saved = load_file(run / "model" / "box_refinement" / "model.safetensors")
    assert saved.keys() == {name.split(".", 1)[1] for name in state if name.startswith("box_refinement.")}
    start = tiny_config(ON, f"data.vocabulary={run / 'model' / 'tokenizer'}", f"box_refinement.weights={run}")
    head = build_model(start, vocab_size=50).box_refinement.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in head.items())
    with pytest.raises(ValueError, match="box_refinement: True -> False"):
        train(replaced(config, box_refinement={"weight": 0.0}), resume=True)

    model = e2e_vl.load(run)
    [image, *_] = sorted((Path(config.data.root) / config.data.files["images"]).iterdir())
    boxes = [[10, 10, 60, 60], [50, 40, 110, 100], [5, 70, 40, 120]]
    answer = model.ask(image, "the red circle", boxes=boxes, top_k=3)
    prediction = answer.prediction
    assert np.allclose(answer.boxes, boxes, atol=1e-3)
    assert np.allclose(answer.refined_boxes, prediction.refined_boxes, atol=1e-3)
    assert {tuple(box) for box in answer.top_boxes.tolist()} == {
        tuple(np.float32(box).tolist()) for box in prediction.refined_boxes
    }
    assert np.allclose(answer.box, answer.top_boxes[0]) and np.allclose(answer.answer_boxes[0][1], answer.box)
    assert answer.phrases[0].proposal in prediction.candidate_boxes

    plain = load_model(trained_run.path)[1]
    assert plain.box_refinement is None
    assert not any(name.startswith("box_refinement") for name in plain.state_dict())


def test_settings_that_cannot_work_are_refused(tiny_config):
    with pytest.raises(ValueError, match=r"box_refinement.weight is 0, so there is no such head"):
        tiny_config("box_refinement.weights=runs/other")
    with pytest.raises(ValueError, match=r"needs boxes that differ from the annotated ones"):
        tiny_config(ON, "data.boxes.train=gt")
    answers = {"name": "vqa", "config": {"answers": ["yes", "no"]}}
    with pytest.raises(ValueError, match=r"the texts of vqa name no boxes to learn from; set phrases.weight too"):
        build_model(replaced(tiny_config(ON), task=answers), vocab_size=50)
