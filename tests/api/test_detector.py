"""`e2e_vl.load_detector`: the regions of any image, and the features of given boxes."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

import e2e_vl
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule
from detector.zoo import cache_folder, known_weights
from e2e_vl.api.detector import TrainedDetector
from tests.detector.published import load_detector, save_detector

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def detector(trained_run) -> TrainedDetector:
    return e2e_vl.load_detector(trained_run.path, device="cpu")


@pytest.fixture(scope="module")
def photo(trained_run) -> Path:
    return Path(json.loads((trained_run.path / "predictions_val_gt.json").read_text("utf-8"))[0]["file_name"])


def test_regions_are_the_regions_of_the_model(detector, trained_run, photo):
    limits = {"min_score": 0.0, "min_regions": 3, "max_regions": 5}
    found = detector.regions(photo, **limits)
    same = e2e_vl.load(trained_run.path, device="cpu").regions(photo, **limits)
    assert 3 <= len(found) <= 5 and (np.diff(found.scores) <= 0).all() and found.names == same.names
    np.testing.assert_array_equal(found.boxes, same.boxes)
    np.testing.assert_array_equal(found.features, same.features)


def test_given_boxes_keep_their_order_and_get_features(detector, photo):
    boxes = [[30.0, 20.0, 70.0, 61.0], [2.0, 3.0, 40.0, 50.0]]
    found = detector.regions(photo, boxes=boxes)
    np.testing.assert_allclose(found.boxes, boxes)
    assert found.features.shape == (2, detector.network.feature_dim) and len(found.names) == 2
    swapped = detector.regions(Image.open(photo), boxes=boxes[::-1])
    np.testing.assert_allclose(swapped.features[::-1], found.features, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"boxes: box 0 \[-9, 2, 20, 30\] lies outside the image"):
        detector.regions(photo, boxes=[-9, 2, 20, 30])


def test_a_saved_detector_and_a_file_with_its_config(detector, tmp_path, trained_run):
    save_detector(load_detector(trained_run.path / "model" / "detector"), tmp_path / "saved")
    file, config = (tmp_path / "saved" / name for name in ("model.safetensors", "config.yaml"))
    for again in (e2e_vl.load_detector(tmp_path / "saved"), e2e_vl.load_detector(file, config)):
        assert again.class_names == detector.class_names
        assert again.network.state_dict().keys() == detector.network.state_dict().keys()


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of published weights whose file is in the cache: a small detector of torchvision, with random values."""
    name = "torchvision/fasterrcnn_mobilenet_v3_large_320_fpn-coco"
    published = known_weights(name)
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("a download"))
    torch.manual_seed(0)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    file = cache_folder() / published.file
    file.parent.mkdir(parents=True)
    torch.save(model.state_dict(), file)
    checksum = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    monkeypatch.setitem(vars(published), "checksum", checksum)  # the published one is of the trained weights
    return name


def test_a_detector_by_name(named: str, tmp_path: Path):
    """Weights from the cache, settings, image size and class names: all follow from the name."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    loaded = e2e_vl.load_detector(named, device="cpu")
    assert loaded.source.weights == cache_folder() / known_weights(named).file
    assert loaded.source.resize == ResizeRule(320, 640, "torchvision")
    assert loaded.class_names[0] == "person" and len(loaded.class_names) == 90
    found = loaded.regions(tmp_path / "photo.png")
    assert 10 <= len(found) <= 36 and found.features.shape == (len(found), 1024)
    assert set(found.names) <= set(loaded.class_names) and found.attributes == []


def test_names_of_classes_and_attributes_from_files(tmp_path: Path):
    """As for bottom-up attention, whose weights come without names."""
    attributes = {"NUM_CLASSES": 2, "EMBEDDING_DIM": 4, "HIDDEN_DIM": 4}
    tree = {
        "RESNETS": {"DEPTH": 18, "STEM_OUT_CHANNELS": 8, "RES2_OUT_CHANNELS": 8},
        "ANCHOR_GENERATOR": {"SIZES": [[16, 32, 64]]},
        "ROI_HEADS": {"NUM_CLASSES": 3},
        "ROI_BOX_HEAD": {"POOLER_RESOLUTION": 4, "ATTRIBUTES": attributes},
    }
    sizes = {"MIN_SIZE_TEST": 96, "MAX_SIZE_TEST": 160}
    save_detector(FasterRCNN(DetectorConfig.from_yaml({"MODEL": tree, "INPUT": sizes})), tmp_path / "saved")
    Image.fromarray(np.full((60, 80, 3), 90, np.uint8)).save(tmp_path / "photo.png")
    (tmp_path / "objects.txt").write_text("yolk,egg yolk\r\ngoal\r\nbathroom\r\n", newline="")
    (tmp_path / "attributes.txt").write_text("up\nfloppy\n")

    unnamed = e2e_vl.load_detector(tmp_path / "saved").regions(tmp_path / "photo.png")
    assert set(unnamed.names) <= {"class 0", "class 1", "class 2"} and unnamed.attributes == []
    loaded = e2e_vl.load_detector(
        tmp_path / "saved", class_names=tmp_path / "objects.txt", attribute_names=tmp_path / "attributes.txt"
    )
    assert loaded.class_names == ("yolk", "goal", "bathroom")
    found = loaded.regions(tmp_path / "photo.png")
    assert found.names == [loaded.class_names[number] for number in unnamed.classes]
    assert len(found.attributes) == len(found) and set(found.attributes) <= {"up", "floppy"}
    given = loaded.regions(tmp_path / "photo.png", boxes=[[2, 3, 40, 50]])
    assert len(given.attributes) == 1
    assert np.any(np.asarray(found.draw()) != np.asarray(unnamed.draw()))


def test_a_detector_that_learned_no_boxes_says_so(pretraining_run, photo):
    for load in (e2e_vl.load_detector, e2e_vl.load):
        with pytest.warns(UserWarning, match="its predicted boxes are random") as said:
            load(pretraining_run).regions(photo)
        assert said[0].filename == __file__
