"""What the stamp says, and that it is the same for equal weights only."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.torch import save_file

from detector.config import SelectionRule
from detector.faster_rcnn import FasterRCNN
from e2e_vl.data.user_inputs import list_images
from e2e_vl.extraction.bulk import ExtractionJob, extract_images, make_stamp, parameters_hash
from e2e_vl.extraction.settings import ExtractionSettings
from e2e_vl.run.launch import make_accelerator

SETTINGS = ExtractionSettings("score", SelectionRule(0.0, 4, 6))


@pytest.mark.usefixtures("on_cpu")
def test_the_stamp_goes_with_the_features_and_says_how(source, folder, tmp_path):
    job = ExtractionJob(
        list_images(folder), tmp_path / "out", "npz", source, SETTINGS, stamp=make_stamp(source, SETTINGS), workers=0
    )
    extract_images(job, make_accelerator("no"))
    stamp = json.loads(str(np.load(job.output / "0.npz")["stamp"]))
    assert stamp == json.loads(json.dumps(job.stamp))
    assert stamp["channel_order"] == "RGB" and stamp["resize"]["short_edge"] == 64
    assert stamp["box_rule"]["selection"] == {"min_score": 0.0, "min_regions": 4, "max_regions": 6}
    assert stamp["weights"]["parameters_sha256"] == parameters_hash(source.detector)


def test_the_stamp_names_the_weights(source, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(source.detector.state_dict(), path)
    again = FasterRCNN(source.detector.config)
    assert parameters_hash(again) != parameters_hash(source.detector)
    again.load_state_dict(source.detector.state_dict())
    assert parameters_hash(again) == parameters_hash(source.detector)
    made = make_stamp(dataclasses.replace(source, detector=again, weights=path), SETTINGS)
    assert made["weights"]["file"] == "w.safetensors" and len(made["weights"]["file_sha256"]) == 64
    assert made["weights"]["random_seed"] is None and make_stamp(source, SETTINGS)["weights"]["random_seed"] == 0
