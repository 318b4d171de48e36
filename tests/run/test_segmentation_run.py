"""Segmentation in whole runs: from the settings to masks of answers, saved and loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import e2e_vl
from detector.errors import UserError
from detector.io import write_json
from e2e_vl.api.onnx_export import export_onnx
from e2e_vl.data.refcoco import read_refs
from e2e_vl.run.build import build_model, build_run
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train
from e2e_vl.tasks.segmentation import SEGMENTATION
from tests.run.runs import SHORT, first_texts, logged, predictions_of
from tests.run.test_phrases_run import joined
from tests.weights.starts import replaced

MASK_HEAD = "detector.overrides.MODEL.ROI_MASK_HEAD={CONV_DIM: 8, CLS_AGNOSTIC_MASK: true}"
ON = ("segmentation.weight=0.5", "detector.overrides.MODEL.MASK_ON=true", MASK_HEAD)

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_the_loss_reaches_the_backbone(tiny_config):
    torch.manual_seed(0)
    run = build_run(tiny_config(*ON, "detector.loss_weight=0", "data.boxes.train=gt"))
    loss = run.model(first_texts(run, 2)).losses[SEGMENTATION]
    assert loss.count > 0
    loss.mean.backward()
    detector = run.model.detector
    assert next(detector.backbone.parameters()).grad.any()
    assert all(parameter.grad is not None for parameter in detector.roi_heads.mask_head.parameters())


def test_a_run_answers_with_masks_and_is_loaded_again(tiny_config, tmp_path):
    config = tiny_config(*ON, *SHORT, "eval.report_pictures=1")
    metrics = train(config)
    run = Path(config.output)
    assert all(line[SEGMENTATION] > 0 for line in logged(run))
    for name in ("oiou", "miou", "mask_precision_50", "mask_precision_90"):
        assert 0 <= metrics[f"val/{name}_gt_boxes"] <= 1
    for record in predictions_of(run, "val_gt"):
        assert record["segmentation"]["size"] == record["gt_segmentation"]["size"] == record["image_size"]
    with pytest.raises(ValueError, match="segmentation: True -> False"):
        train(replaced(config, segmentation={"weight": 0.0}), resume=True)

    model = e2e_vl.load(run)
    [image, *_] = sorted((Path(config.data.root) / config.data.files["images"]).iterdir())
    answer = model.ask(image, "the red circle", boxes=[[10, 10, 60, 60], [50, 40, 110, 100]])
    assert answer.mask.dtype == bool and answer.mask.shape == tuple(answer.prediction.image_size)
    x1, y1, x2, y2 = np.round(answer.box).astype(int)
    outside = answer.mask.copy()
    outside[max(y1 - 1, 0) : y2 + 1, max(x1 - 1, 0) : x2 + 1] = False
    assert not outside.any()
    answer.save(tmp_path / "answer.json")
    assert json.loads((tmp_path / "answer.json").read_text())["prediction"]["segmentation"]["counts"]
    assert model.network.detector.config.mask_on and load_model(run)[1].segmentation is not None
    with pytest.raises(ValueError, match="masks are not exported"):
        export_onnx(model, tmp_path / "onnx")


def test_settings_that_cannot_work_are_refused(tiny_config):
    with pytest.raises(ValueError, match=r"set detector.overrides.MODEL.MASK_ON to true"):
        build_model(tiny_config("segmentation.weight=1"), vocab_size=50)
    with pytest.raises(ValueError, match=r"segmentation.weight is 0, so that nothing trains the mask head"):
        build_model(tiny_config("detector.overrides.MODEL.MASK_ON=true"), vocab_size=50)
    with pytest.raises(ValueError, match=r"the detector's mask head, which detector.freeze freezes"):
        tiny_config(*ON, "detector.freeze=true", "detector.loss_weight=0")
    answers = {"name": "vqa", "config": {"answers": ["yes", "no"]}}
    with pytest.raises(ValueError, match=r"the task vqa has no masks"):
        build_model(replaced(tiny_config(*ON), task=answers), vocab_size=50)
    with pytest.raises(ValueError, match=r"the reader of data.name refcoco_parquet reads no masks"):
        build_model(tiny_config(*ON, "data.name=refcoco_parquet"), vocab_size=50)


def test_masks_are_needed_at_once_and_belong_to_the_records_of_a_run(tiny_config, tiny_data, tmp_path):
    shutil.copytree(tiny_data, tmp_path / "data")
    config = tiny_config(*ON, f"data.root={tmp_path / 'data'}")
    fingerprint = build_run(config).train_data.fingerprint()
    path = Path(config.data.root) / config.data.files["instances"]
    content = json.loads(path.read_text("utf-8"))
    for annotation in content["annotations"]:
        annotation["segmentation"] = [annotation["segmentation"][0][:6]]
    write_json(path, content)
    assert build_run(config).train_data.fingerprint() != fingerprint
    refs = read_refs(path.parent / "refs(unc).p")
    named = next(ref.ann_id for ref in refs if ref.split == "val")
    for annotation in content["annotations"]:
        if annotation["id"] == named:
            annotation["segmentation"] = []
    write_json(path, content)
    build_run(config)
    with pytest.raises(UserError, match=rf"annotation {named} has no mask"):
        build_run(config, evaluates=True)


def test_texts_of_joined_data_without_masks_learn_none(tmp_path):
    run = build_run(joined("refcoco", tmp_path, *ON))
    output = run.model(first_texts(run, texts=1))
    masks = output.batch.targets.named_masks()
    part = run.train_data.dataset.members[0]
    assert 0 < len(masks.masks) == len(part.dataset.groups) < len(output.text_regions.boxes)
    assert output.losses[SEGMENTATION].count == len(masks.masks)
