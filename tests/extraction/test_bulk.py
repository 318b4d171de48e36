"""Bulk extraction in this process: rules, given boxes, interruptions, failures."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from detector.config import SelectionRule
from detector.faster_rcnn import FasterRCNN
from detector.images import resize_boxes
from e2e_vl.config import ExtractionSettings
from e2e_vl.data.features import open_features
from e2e_vl.data.user_inputs import GivenBoxes, list_images
from e2e_vl.extraction import bulk
from e2e_vl.extraction.bulk import ExtractionJob, ExtractionSummary, extract_images, make_stamp, parameters_hash
from e2e_vl.run.launch import make_accelerator
from tests.data.helpers import refused
from tests.extraction.conftest import SIZES, network_input

pytestmark = pytest.mark.usefixtures("on_cpu")
FOUR_TO_SIX = ExtractionSettings("score", SelectionRule(0.0, 4, 6))


@pytest.fixture
def make_job(folder: Path, source, tmp_path: Path):
    def make(layout: str = "npz", settings=FOUR_TO_SIX, **changes) -> ExtractionJob:
        output = tmp_path / {"npz": "out", "hdf5": "out.h5"}.get(layout, f"out.{layout}")
        stamp = make_stamp(source, settings)
        job = ExtractionJob(list_images(folder), output, layout, source, settings, None, stamp, batch_size=2, workers=0)
        return dataclasses.replace(job, **changes)

    return make


def extract(job: ExtractionJob) -> ExtractionSummary:
    return extract_images(job, make_accelerator("no"))


def described_again(source, image, boxes: np.ndarray) -> np.ndarray:
    """Features of boxes, in pixels of the original image, from the detector's own call."""
    resized = resize_boxes(boxes, image.original_size, image.pixels.shape[:2])
    with torch.no_grad():
        return source.detector(network_input(source, image), [torch.from_numpy(resized)]).features[0].numpy()


@pytest.mark.parametrize(
    "settings",
    [
        ExtractionSettings("score", SelectionRule(0.0, 6, 6)),
        ExtractionSettings("maxconf", SelectionRule(0.5, 3, 8), "proposal", attributes=True),
        ExtractionSettings("maxconf", SelectionRule(0.5, 3, 8), "final"),
        ExtractionSettings("maxnms", SelectionRule(0.0, 7, 7), "final", attributes=True),
    ],
    ids=lambda settings: f"{settings.rule}-{settings.features_of}",
)
def test_features_are_those_of_the_boxes(settings, make_job, source, input_of):
    summary = extract(make_job(settings=settings))
    assert (summary.extracted, summary.existing, summary.below_minimum, summary.failures) == (5, 0, 0, {})
    store = open_features(make_job().output)
    assert store.ids == ["0", "1", "2", "3", "4"]
    for record, size in zip(map(store.read, store.ids), SIZES, strict=True):
        assert record.image_size == size
        assert settings.selection_rule.min_regions <= len(record) <= settings.selection_rule.max_regions
        assert np.allclose(described_again(source, input_of(record.image_id), record.boxes), record.features, atol=1e-4)
        assert (record.boxes >= 0).all() and (record.boxes <= [size[1], size[0]] * 2).all()
        assert (record.attributes is None) is not settings.attributes
        if settings.features_of == "proposal":
            logits = source.detector.roi_heads.box_predictor.class_logits(torch.from_numpy(record.features))
            best = logits.softmax(dim=1)[:, :-1].max(dim=1)
            assert np.array_equal(best.indices.numpy(), record.classes)
            assert np.allclose(best.values.detach().numpy(), record.scores, atol=1e-5)


def test_given_boxes(make_job, source, input_of):
    boxes = np.array([[3.2, 4, 50, 60.7], [0, 0, 200, 300], [10, 10, 12, 30]])
    given = {"0": GivenBoxes(boxes, np.array([5, 4, 9])), "3": GivenBoxes(boxes + 500, np.array([1, 2, 3]))}
    settings = ExtractionSettings("given", image_feature=True)
    summary = extract(make_job("hdf5", settings=settings, given=given))
    assert summary.extracted == 4 and list(summary.failures) == ["3"] and "lies outside" in summary.failures["3"]
    store = open_features(make_job("hdf5").output)
    assert store.ids == ["0", "1", "2", "4"] and len(store["1"]) == 0
    record = store["0"]
    assert record.box_ids.tolist() == [5, 4, 9]
    assert np.allclose(record.boxes, [[3.2, 4, 50, 60.7], [0, 0, 90, 70], [10, 10, 12, 30]])
    last_pixel = [[3.2, 4, 50, 60.7], [0, 0, 90 * 81 / 82, 70 * 63 / 64], [10, 10, 12, 30]]  # resized to 82 x 64
    again = described_again(source, input_of("0"), np.array(last_pixel, dtype=np.float32))
    assert np.allclose(record.features, again, atol=1e-4)
    whole = described_again(source, input_of("0"), np.array([[0, 0, *last_pixel[1][2:]]], dtype=np.float32))
    assert np.allclose(record.image_feature, whole[0], atol=1e-4)


def test_an_interrupted_extraction_goes_on(make_job, monkeypatch):
    job, save, saved = make_job("hdf5"), bulk.save_npz, []

    def save_some(path, record, stamp):
        if len(saved) == 3:
            raise KeyboardInterrupt
        saved.append(record.image_id)
        save(path, record, stamp)

    monkeypatch.setattr(bulk, "save_npz", save_some)
    with pytest.raises(KeyboardInterrupt):
        extract(job)
    assert not job.output.exists()
    monkeypatch.setattr(bulk, "save_npz", save)
    left = job.folder / ".stamp.json.12.34.part"
    left.write_text('{"box_')  # killed while a file was written
    summary = extract(job)
    assert (summary.existing, summary.extracted) == (3, 2)
    assert open_features(job.output).ids == ["0", "1", "2", "3", "4"] and not job.folder.exists()
    job.folder.mkdir()  # killed while the merged files were removed
    assert extract(job).existing == 5 and not job.folder.exists()
    job.output.unlink()
    job.folder.mkdir()
    left.write_text('{"box_')  # killed before the first file had its name
    assert extract(job).extracted == 5 and not left.exists()


@pytest.mark.parametrize("layout", ["npz", "tsv"])
def test_a_damaged_image_does_not_stop_the_others(layout, make_job, folder, tmp_path):
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    whole = (mixed / "1.png").read_bytes()
    (mixed / "1.png").write_bytes(whole[:500])
    summary = extract(make_job(layout, images=list_images(mixed)))
    assert list(summary.failures) == ["1"] and str(mixed / "1.png") in summary.failures["1"]
    assert open_features(make_job(layout).output).ids == ["0", "2", "3", "4"]
    (mixed / "1.png").write_bytes(whole)
    summary = extract(make_job(layout, images=list_images(mixed)))
    assert (summary.existing, summary.extracted, summary.failures) == (4, 1, {})
    assert open_features(make_job(layout).output).ids == ["0", "1", "2", "3", "4"]


def test_other_settings_need_another_output(make_job):
    extract(make_job())
    extract(make_job("tsv"))
    other = ExtractionSettings("score", SelectionRule(0.0, 4, 5))
    with refused("out", "box_rule"):
        extract(make_job(settings=other))
    with refused("out.tsv"):
        extract(make_job("tsv", settings=other))


def test_the_stamp_goes_with_the_features_and_names_the_weights(make_job, source, tmp_path):
    job = make_job()
    extract(job)
    stamp = json.loads(str(np.load(job.output / "0.npz")["stamp"]))
    assert stamp == json.loads(json.dumps(job.stamp))
    assert stamp["channel_order"] == "RGB" and stamp["resize"]["short_edge"] == 64
    assert stamp["box_rule"]["selection"] == {"min_score": 0.0, "min_regions": 4, "max_regions": 6}
    assert stamp["weights"]["parameters_sha256"] == parameters_hash(source.detector)
    path = tmp_path / "w.safetensors"
    save_file(source.detector.state_dict(), path)
    again = FasterRCNN(source.detector.config)
    assert parameters_hash(again) != parameters_hash(source.detector)
    again.load_state_dict(source.detector.state_dict())
    assert parameters_hash(again) == parameters_hash(source.detector)
    made = make_stamp(dataclasses.replace(source, detector=again, weights=path), job.settings)
    assert made["weights"]["file"] == "w.safetensors" and len(made["weights"]["file_sha256"]) == 64
    assert made["weights"]["random_seed"] is None and stamp["weights"]["random_seed"] == 0
