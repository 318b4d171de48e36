"""Detection as a task, from the synthetic data to the metrics of a run that is loaded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from detector.checkpoint import save_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from e2e_vl.config import RunConfig, SyntheticDataConfig
from e2e_vl.config_files import load_config
from e2e_vl.run.build import build_examples, build_run
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from tests.run.runs import ROOT, TINY_DETECTOR, first_texts, logged, predictions_of
from tests.same import assert_same
from tests.weights.starts import replaced

SMALL = "detector.overrides.MODEL"

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def detection_config(tiny_words: list[str], tmp_path: Path) -> Callable[..., RunConfig]:
    """The demo on the data of the other tiny runs."""

    def make(*words: str) -> RunConfig:
        small = ("data={resize: {short_edge: [128], long_edge: 160}, workers: 0}", f"output={tmp_path / 'run'}")
        rpn = f"{SMALL}.RPN={{PRE_NMS_TOPK_TRAIN: 100, POST_NMS_TOPK_TRAIN: 30, POST_NMS_TOPK_TEST: 20}}"
        anchors = f"{SMALL}.ANCHOR_GENERATOR.SIZES=[[18, 26, 40]]"
        demo = ROOT / "configs" / "demo" / "detection.yaml"
        config = load_config(demo, [*tiny_words, *small, rpn, anchors, *words])
        return replaced(config, data={"synthetic": SyntheticDataConfig()})  # the data are there

    return make


@pytest.mark.timeout(1200)  # on a machine that may be busy
def test_a_detector_from_scratch_reaches_an_average_precision(tmp_path: Path):
    """One or two large circles and crosses a scene, scored on scenes it was not trained on, also when it is loaded."""
    scene = "{min_side: 96, max_side: 96, min_objects: 1, max_objects: 2, small: [24, 30], big: [32, 40], "
    words = [
        *(TINY_DETECTOR, f"output={tmp_path / 'run'}", f"data.root={tmp_path / 'data'}"),
        "data.synthetic.scenes={train: 80, val: 20}",
        f"data.synthetic.config={{scene: {scene} textures: [plain], shapes: [circle, cross]}}}}",
        "data={resize: {short_edge: [96], long_edge: 96}, workers: 0}",
        f"{SMALL}.RPN={{PRE_NMS_TOPK_TRAIN: 60, POST_NMS_TOPK_TRAIN: 20, POST_NMS_TOPK_TEST: 10}}",
        f"{SMALL}.ANCHOR_GENERATOR.SIZES=[[24, 36]]",
        "train={images_per_batch: 4, max_steps: 80, warmup_steps: 10, lr: 4.0e-3, save_every_epochs: 0, log_every: 1}",
        "eval={every_epochs: 0, report_pictures: 4}",
    ]
    metrics = train(load_config(ROOT / "configs" / "demo" / "detection.yaml", words))
    assert metrics["val/AP50_predicted_boxes"] > 0.3
    assert metrics["val/AP_predicted_boxes"] <= metrics["val/AP50_predicted_boxes"]
    assert metrics["parameters"]["encoder"] == metrics["parameters"]["task"] == 0
    run = tmp_path / "run"
    lines = logged(run)
    names = {"loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg"}
    assert names <= set(lines[0]) and "loss_attribute" not in lines[0]
    for line in lines:
        assert line["loss"] == pytest.approx(sum(line[name] * (1 + (name == "loss_cls")) for name in names), rel=1e-5)

    records = predictions_of(run, "val_online")
    assert len(records) == 20
    assert all(set(record["category_ids"]) <= set(range(1, 7)) and 0 <= record["correct"] <= 1 for record in records)
    assert (run / "report.html").read_text().count("F1 ") == 4
    again, _ = evaluate_run(run, split="val", boxes="online", output=run / "again.json")
    assert_same(again, {name: metrics[name] for name in again})

    detector = run / "model" / "detector" / "model.safetensors"
    torch.manual_seed(1)
    save_weights(FasterRCNN(DetectorConfig.from_yaml(detector.with_name("config.yaml"))).state_dict(), detector)
    untrained, _ = evaluate_run(run, split="val", boxes="online")
    assert untrained["val/AP50_predicted_boxes"] < 0.05


def test_the_gradient_reaches_the_whole_detector_also_in_images_without_objects(detection_config):
    config = detection_config()
    run = build_run(config)
    model = run.model.train()
    instances = run.train_data.dataset.instances
    content = json.loads(instances.path.read_text())
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] != instances.images[0].id]
    instances.path.write_text(json.dumps(content))
    run.train_data = build_examples(config, model, run.tokenizer, "train", boxes="online", training=True)
    assert not run.train_data.dataset.instances[instances.images[0].id].objects

    def gradients(images: int) -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        losses = model(first_texts(run, images)).losses
        assert all(torch.isfinite(loss.total) for loss in losses.values())
        sum(loss.mean for loss in losses.values()).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    for name, gradient in gradients(2).items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.any(), name
    alone = gradients(1)
    assert alone["detector.backbone.stem.conv1.weight"].any()
    assert not alone["detector.roi_heads.box_predictor.bbox_pred.weight"].any()  # there is no box to learn


def test_settings_that_detection_cannot_work_with(detection_config):
    with pytest.raises(ValueError, match=r"does not support boxes from 'gt'"):
        build_run(detection_config("data.boxes.train=gt"))
    with pytest.raises(ValueError, match="6 categories, but the detector has 7 classes"):
        build_run(detection_config(f"{SMALL}.ROI_HEADS.NUM_CLASSES=7"))
