"""The detector's settings of a run: a file, published weights by name, and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.config import DetectorSettings, read_detector_config

TINY = str(Path(__file__).parents[1] / "configs" / "detector" / "tiny.yaml")


def test_a_file_with_overrides():
    plain = read_detector_config(DetectorSettings(config=TINY))
    changed = read_detector_config(
        DetectorSettings(config=TINY, overrides={"MODEL": {"ROI_HEADS": {"NUM_CLASSES": 3}}})
    )
    assert plain.roi_heads.num_classes != 3 and changed.roi_heads.num_classes == 3
    assert changed.resnet == plain.resnet


def test_published_weights_bring_their_settings():
    config = read_detector_config(DetectorSettings(config="torchvision/fasterrcnn_resnet50_fpn_v2-coco"))
    assert config.input.format == "RGB" and config.roi_heads.num_classes == 90 and config.box_head.num_conv == 4


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"config": "nowhere.yaml"}, FileNotFoundError, "Detector config nowhere.yaml does not exist"),
        ({"config": "torchvision/fasterrcnn_resnet50"}, ValueError, "did you mean torchvision/fasterrcnn_resnet50_fpn"),
        ({"config": TINY, "overrides": {"MODEL": {"FOO": 1}}}, ValueError, "MODEL.FOO"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(settings, error, message):
    with pytest.raises(error, match=message) as raised:
        read_detector_config(DetectorSettings(**settings))
    assert "\n" not in str(raised.value)
