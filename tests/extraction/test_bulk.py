"""Bulk extraction in this process: rules, given boxes, resuming, failures, stamps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from detector.boxes import pairwise_iou
from detector.faster_rcnn import FasterRCNN
from detector.images import load_image, make_image_batch, resize_boxes, resize_image
from detector.selection import SelectionRule
from e2e_vl.data.features.record import load_npz
from e2e_vl.data.features.stores import open_features
from e2e_vl.data.image_lists import GivenBoxes, list_images
from e2e_vl.engine import bulk_extract
from e2e_vl.engine.bulk_extract import Extraction, extract_features, make_stamp, parameters_hash
from e2e_vl.engine.describe import Describer, DescribeSettings
from e2e_vl.engine.extract import build_extractor

pytestmark = pytest.mark.usefixtures("on_cpu")
SIZES = [(70, 90), (70, 90), (90, 70), (40, 120), (70, 90)]
YAML = """
MODEL:
  RESNETS: {DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8}
  ANCHOR_GENERATOR: {SIZES: [[16, 32, 64]]}
  RPN: {PRE_NMS_TOPK_TEST: 200, POST_NMS_TOPK_TEST: 50}
  ROI_HEADS: {NUM_CLASSES: 5}
  ROI_BOX_HEAD: {POOLER_RESOLUTION: 4, ATTRIBUTES: {NUM_CLASSES: 3, EMBEDDING_DIM: 4, HIDDEN_DIM: 8}}
INPUT: {FORMAT: RGB, MIN_SIZE_TEST: 64, MAX_SIZE_TEST: 128}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def extractor(tmp_path_factory: pytest.TempPathFactory):
    """A random detector whose class scores differ enough to choose by."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(YAML)
    made = build_extractor(path, None, SelectionRule())
    torch.manual_seed(0)
    for layer in (made.detector.roi_heads.box_predictor.cls_score, made.detector.roi_heads.box_predictor.bbox_pred):
        torch.nn.init.normal_(layer.weight, std=1.0)
    return made


@pytest.fixture
def make_job(folder: Path, extractor, tmp_path: Path):
    def make(layout: str = "npz", **changes) -> Extraction:
        name = {"npz": "out", "hdf5": "out.h5"}.get(layout, f"out.{layout}")
        settings = changes.pop("settings", DescribeSettings("score", SelectionRule(0.0, 4, 6)))
        stamp = make_stamp(extractor.detector, extractor.resize, settings, weights=None, seed=0, boxes_file=None)
        common = {"detector": extractor.detector, "resize": extractor.resize, "workers": 0, "batch_size": 2}
        return Extraction(
            **{
                "images": list_images(folder),
                "output": tmp_path / name,
                "layout": layout,
                "settings": settings,
                "stamp": stamp,
                **common,
                **changes,
            }
        )

    return make


def network_input(extractor, path: Path):
    image = load_image(path, "RGB")
    pixels = resize_image(image, extractor.resize.target_size(*image.shape[:2]))
    settings = extractor.detector.config.input
    return make_image_batch([pixels], [image.shape[:2]], ["x"], settings.pixel_mean, settings.pixel_std)


def described_again(extractor, folder: Path, record, boxes=None) -> np.ndarray:
    """Features of the record's boxes from the detector's own call, one image at a time."""
    batch = network_input(extractor, folder / f"{record.image_id}.png")
    boxes = record.boxes if boxes is None else boxes
    resized = resize_boxes(boxes, record.image_size, tuple(batch.sizes[0].tolist()))
    with torch.no_grad():
        return extractor.detector(batch, [torch.from_numpy(resized)]).features[0].numpy()


@pytest.mark.parametrize(
    "settings",
    [
        DescribeSettings("score", SelectionRule(0.0, 6, 6)),
        DescribeSettings("maxconf", SelectionRule(0.5, 3, 8), "proposal", attributes=True),
        DescribeSettings("maxconf", SelectionRule(0.5, 3, 8), "final"),
        DescribeSettings("maxnms", SelectionRule(0.0, 7, 7), "final", attributes=True),
    ],
    ids=lambda settings: f"{settings.rule}-{settings.features_of}",
)
def test_features_are_those_of_the_boxes(settings, make_job, extractor, folder):
    summary = extract_features(make_job(settings=settings))
    assert (summary.done, summary.before, summary.few, summary.failures) == (5, 0, 0, {})
    store = open_features(make_job().output)
    assert store.ids == ["0", "1", "2", "3", "4"]
    for record, size in zip(store, SIZES, strict=True):
        assert record.image_size == size
        assert settings.numbers.min_regions <= len(record) <= settings.numbers.max_regions
        assert np.allclose(described_again(extractor, folder, record), record.features, atol=1e-4)
        assert (record.boxes >= 0).all() and (record.boxes <= [size[1], size[0]] * 2).all()
        assert (record.attributes is None) is not settings.attributes
        if settings.features_of == "proposal":
            logits = extractor.detector.roi_heads.box_predictor.class_logits(torch.from_numpy(record.features))
            best = logits.softmax(dim=1)[:, :-1].max(dim=1)
            assert np.array_equal(best.indices.numpy(), record.classes)
            assert np.allclose(best.values.detach().numpy(), record.scores, atol=1e-5)


def test_features_of_the_proposal_with_a_refined_box(make_job, extractor, folder):
    """The boxes are those of "final", the features are not."""
    numbers = SelectionRule(0.0, 5, 5)
    images = network_input(extractor, folder / "0.png")
    final, proposal = (
        Describer(extractor.detector, DescribeSettings("maxnms", numbers, of))(images, ["0"], None)[0]
        for of in ("final", "proposal")
    )
    assert np.array_equal(final.boxes, proposal.boxes) and np.array_equal(final.classes, proposal.classes)
    assert not np.allclose(final.features, proposal.features, atol=1e-3)
    maps = extractor.detector.features(images)
    generator = extractor.detector.proposal_generator
    boxes = generator.propose(generator(maps), [tuple(images.sizes[0].tolist())]).boxes[0]
    with torch.no_grad():
        all_features = extractor.detector(images, [boxes]).features[0].numpy()
    for row in proposal.features:
        assert np.abs(all_features - row).max(axis=1).min() < 1e-4


def test_the_score_rule(make_job, extractor, folder):
    images = network_input(extractor, folder / "0.png")
    every = Describer(extractor.detector, DescribeSettings("score", SelectionRule(0.0, 0, 100)))(images, ["0"], None)[0]
    overlap = pairwise_iou(every.boxes, every.boxes) - np.eye(len(every))
    assert len(every) > 8 and overlap.max() < 0.7 + 1e-3
    assert (np.diff(every.scores) <= 0).all()
    middle = float(every.scores[4])
    rule = SelectionRule(middle, 2, 100)
    some = Describer(extractor.detector, DescribeSettings("score", rule))(images, ["0"], None)[0]
    assert np.array_equal(some.boxes, every.boxes[every.scores >= middle])


def test_given_boxes(make_job, extractor, folder):
    boxes = np.array([[3.2, 4, 50, 60.7], [0, 0, 200, 300], [10, 10, 12, 30]])
    given = {"0": GivenBoxes(boxes, np.array([5, 4, 9])), "3": GivenBoxes(boxes + 500, np.array([1, 2, 3]))}
    settings = DescribeSettings("given", image_feature=True)
    summary = extract_features(make_job("hdf5", settings=settings, given=given))
    assert summary.done == 4 and list(summary.failures) == ["3"] and "lies outside" in summary.failures["3"]
    store = open_features(make_job("hdf5").output)
    assert store.ids == ["0", "1", "2", "4"] and len(store["1"]) == 0
    record = store["0"]
    assert record.box_ids.tolist() == [5, 4, 9]
    assert np.allclose(record.boxes, [[3.2, 4, 50, 60.7], [0, 0, 90, 70], [10, 10, 12, 30]])
    last_pixel = [[3.2, 4, 50, 60.7], [0, 0, 90 * 81 / 82, 70 * 63 / 64], [10, 10, 12, 30]]  # resized to 82 x 64
    again = described_again(extractor, folder, record, np.array(last_pixel, dtype=np.float32))
    assert np.allclose(record.features, again, atol=1e-4)
    whole = described_again(extractor, folder, record, np.array([[0, 0, *last_pixel[1][2:]]], dtype=np.float32))
    assert np.allclose(record.image_feature, whole[0], atol=1e-4)


def test_an_interrupted_extraction_goes_on(make_job, monkeypatch):
    extract_features(make_job("hdf5"))
    expected = make_job("hdf5").output.read_bytes()
    make_job("hdf5").output.unlink()

    save = bulk_extract.save_npz
    saved = []

    def save_some(file, record, stamp):
        if len(saved) == 3:
            file.write(b"half of a fil")
            raise KeyboardInterrupt
        saved.append(record.image_id)
        save(file, record, stamp)

    monkeypatch.setattr(bulk_extract, "save_npz", save_some)
    with pytest.raises(KeyboardInterrupt):
        extract_features(make_job("hdf5"))
    assert not make_job("hdf5").output.exists()

    def save_others(file, record, stamp):
        assert record.image_id not in saved[:3], "done twice"
        saved.append(record.image_id)
        save(file, record, stamp)

    monkeypatch.setattr(bulk_extract, "save_npz", save_others)
    summary = extract_features(make_job("hdf5"))
    assert (summary.before, summary.done) == (3, 2) and sorted(saved) == ["0", "1", "2", "3", "4"]
    found, original = open_features(make_job("hdf5").output), make_job("hdf5").output.with_name("original.h5")
    original.write_bytes(expected)
    for record in open_features(original):
        assert np.array_equal(found[record.image_id].boxes, record.boxes)
        assert np.allclose(found[record.image_id].features, record.features, atol=1e-5)
    assert not make_job("hdf5").folder.exists()
    assert extract_features(make_job("hdf5")).before == 5


@pytest.mark.parametrize("layout", ["npz", "tsv"])
def test_a_damaged_image_does_not_stop_the_others(layout, make_job, folder, tmp_path):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for path in folder.iterdir():
        (mixed / path.name).write_bytes(path.read_bytes())
    (mixed / "1.png").write_bytes((folder / "1.png").read_bytes()[:500])
    summary = extract_features(make_job(layout, images=list_images(mixed)))
    assert list(summary.failures) == ["1"] and str(mixed / "1.png") in summary.failures["1"]
    assert open_features(make_job(layout).output).ids == ["0", "2", "3", "4"]
    (mixed / "1.png").write_bytes((folder / "1.png").read_bytes())
    summary = extract_features(make_job(layout, images=list_images(mixed)))
    assert (summary.before, summary.done, summary.failures) == (4, 1, {})
    assert open_features(make_job(layout).output).ids == ["0", "1", "2", "3", "4"]


def test_other_settings_or_images_need_another_output(make_job):
    extract_features(make_job())
    extract_features(make_job("tsv"))
    other = DescribeSettings("score", SelectionRule(0.0, 4, 5))
    with pytest.raises(ValueError, match=r"out was begun with other settings \(box_rule\)"):
        extract_features(make_job(settings=other))
    with pytest.raises(ValueError, match=r"out\.tsv exists and holds other images or was made differently"):
        extract_features(make_job("tsv", settings=other))
    fewer = make_job().images[1:]
    with pytest.raises(ValueError, match="features of image 0, which is not listed"):
        extract_features(make_job(images=fewer))


def test_the_stamp_says_how(make_job, extractor, tmp_path):
    job = make_job()
    extract_features(job)
    stamp = load_npz(job.output / "0.npz")[1]
    assert stamp == json.loads(json.dumps(job.stamp))
    assert stamp["channel_order"] == "RGB" and stamp["resize"]["short_edge"] == 64
    assert stamp["box_rule"]["selection"] == {"min_score": 0.0, "min_regions": 4, "max_regions": 6}
    assert stamp["weights"]["parameters_sha256"] == parameters_hash(extractor.detector)
    path = tmp_path / "w.safetensors"
    save_file(extractor.detector.state_dict(), path)
    again = FasterRCNN(extractor.detector.config)
    assert parameters_hash(again) != parameters_hash(extractor.detector)
    again.load_state_dict(extractor.detector.state_dict())
    assert parameters_hash(again) == parameters_hash(extractor.detector)
    made = make_stamp(again, extractor.resize, job.settings, weights=path, seed=0, boxes_file=None)
    assert made["weights"]["file"] == "w.safetensors" and len(made["weights"]["file_sha256"]) == 64


def test_a_detector_without_attributes(extractor):
    bare = build_extractor_without_attributes()
    with pytest.raises(ValueError, match="no attribute head"):
        Describer(bare, DescribeSettings("score", attributes=True))


def build_extractor_without_attributes() -> FasterRCNN:
    from detector.config import DetectorConfig

    return FasterRCNN(DetectorConfig.from_flat({"MODEL.RESNETS.DEPTH": 18, "MODEL.RESNETS.RES2_OUT_CHANNELS": 8}))
