"""From images to regions: the rules, which features belong to the boxes, single images, and many images in bulk."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors.torch import save_file

from detector.boxes import is_larger, pairwise_iou
from detector.config import DetectorConfig, SelectionRule
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule, load_resized, make_image_batch, normalise_images, resize_boxes
from detector.structures import ImageBatch, RoIFeatures
from e2e_vl.config import ExtractionConfig
from e2e_vl.config_files import save_config
from e2e_vl.data.features import RegionFeatures, open_features
from e2e_vl.data.user_inputs import GivenBoxes, ListedImage, list_images
from e2e_vl.extraction import bulk
from e2e_vl.extraction.bulk import ExtractionJob, ExtractionSummary, extract_images, make_stamp, parameters_hash
from e2e_vl.extraction.regions import (
    MAX_CANDIDATES,
    SAME_PLACE,
    InputImage,
    LoadedDetector,
    RegionExtractor,
    _Proposals,
    detector_of_run,
    extract_image,
    open_detector,
    select_candidate_pairs,
)
from e2e_vl.io import LOCK_FILE
from e2e_vl.run.launch import make_accelerator
from tests.data.helpers import refused
from tests.weights.starts import replaced, same

pytestmark = pytest.mark.usefixtures("on_cpu")
RULE = SelectionRule(0.9, 12, 20)
FOUR_TO_SIX = ExtractionConfig("score", SelectionRule(0.0, 4, 6))
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
    """0.png .. 4.png with the sizes `SIZES`."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture(scope="module")
def source(config_file: Path) -> LoadedDetector:
    """A random detector whose class scores differ enough to choose by."""
    made = open_detector(config_file, None)
    torch.manual_seed(0)
    for layer in (made.detector.roi_heads.box_predictor.cls_score, made.detector.roi_heads.box_predictor.bbox_pred):
        torch.nn.init.normal_(layer.weight, std=1.0)
    return made


@pytest.fixture(scope="module")
def input_of(folder: Path, source: LoadedDetector):
    """`input_of("0")`: the image 0.png as the chain takes it."""

    def load(image_id: str) -> InputImage:
        path, channel_order = folder / f"{image_id}.png", source.detector.config.input.format
        return InputImage(image_id, str(path), *load_resized(path, source.resize, channel_order))

    return load


def network_input(source: LoadedDetector, image: InputImage) -> ImageBatch:
    batch = make_image_batch([image.pixels], [image.original_size], ["x"])
    return normalise_images(batch, source.detector.config.input)


def test_features_of_the_proposal_with_a_refined_box(source, input_of):
    """The boxes are the boxes of "final"; the features are not."""
    numbers, image = SelectionRule(0.0, 5, 5), input_of("0")
    final, proposal = (
        RegionExtractor(source.detector, ExtractionConfig("maxnms", numbers, of))([image])[0]
        for of in ("final", "proposal")
    )
    assert np.array_equal(final.boxes, proposal.boxes)
    assert np.array_equal(final.predictions.classes, proposal.predictions.classes)
    assert not np.allclose(final.features, proposal.features, atol=1e-3)
    images = network_input(source, image)
    maps = source.detector.features(images)
    generator = source.detector.proposal_generator
    boxes = generator.propose(generator(maps), [tuple(images.sizes[0].tolist())]).boxes[0]
    with torch.no_grad():
        all_features = source.detector(images, [boxes]).features[0].numpy()
    for row in proposal.features:
        assert np.abs(all_features - row).max(axis=1).min() < 1e-4


def test_maxconf_suppresses_boxes_in_pixels_of_the_original_image(source):
    """Widths are x2 - x1 + 1 there: boxes of one pixel beside each other overlap by a third."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [10, 0, 20, 10], [40, 40, 60, 60]])  # of an image that was enlarged tenfold
    vectors = torch.zeros(3, 1)
    proposals = _Proposals(
        boxes, RoIFeatures(vectors, vectors), torch.tensor([[0.9], [0.8], [0.7]]), boxes[:, None].clone()
    )
    extractor = RegionExtractor(source.detector, ExtractionConfig("maxconf", SelectionRule(0.5, 0, 9), "proposal"))
    for original_size, rows in (((7, 9), [0, 2]), ((70, 90), [0, 1, 2])):
        image = InputImage("0", "0.png", np.zeros((70, 90, 3), dtype=np.uint8), original_size)
        selected = extractor._select(proposals, image)
        assert selected.boxes.tolist() == boxes[rows].tolist()
        assert selected.scores.tolist() == pytest.approx(proposals.probs[rows, 0].tolist())


def test_attributes_are_of_the_background_where_it_wins(source, input_of):
    detector = copy.deepcopy(source.detector)
    predictor = detector.roi_heads.box_predictor
    torch.nn.init.constant_(predictor.cls_score.bias[-1:], 1000.0)
    torch.nn.init.normal_(predictor.cls_embedding.weight, std=9.0)
    settings = ExtractionConfig("maxconf", SelectionRule(0.0, 3, 8), "proposal", attributes=True)
    [regions] = RegionExtractor(detector, settings)([input_of("0")])
    background = torch.full((len(regions),), predictor.num_classes)
    with torch.no_grad():
        logits = predictor.attributes(torch.from_numpy(regions.features), background)[:, :-1]
    assert np.allclose(regions.predictions.attribute_scores, logits.softmax(dim=1).max(dim=1).values, atol=1e-5)


def by_score(detector: FasterRCNN, image: InputImage, rule: SelectionRule) -> RegionFeatures:
    return RegionExtractor(detector, ExtractionConfig("score", rule))([image])[0]


def test_the_score_rule_keeps_one_detection_of_a_place(source):
    """Two classes of one box are two detections of the detector, and one region."""
    boxes = torch.tensor([[0.0, 0, 30, 30], [40, 40, 60, 60]])
    vectors = torch.zeros(2, 1)
    probs = torch.tensor([[0.6, 0.3], [0.1, 0.5]])
    proposals = _Proposals(boxes, RoIFeatures(vectors, vectors), probs, boxes[:, None].repeat(1, 2, 1))
    image = InputImage("0", "0.png", np.zeros((70, 90, 3), dtype=np.uint8), (70, 90))
    extractor = RegionExtractor(source.detector, ExtractionConfig("score", SelectionRule(0.0, 0, 9)))
    selected = extractor._select(proposals, image)
    assert selected.boxes.tolist() == boxes.tolist() and selected.classes.tolist() == [0, 1]


def test_the_score_rule(source, input_of):
    every = by_score(source.detector, input_of("0"), SelectionRule(0.0, 0, 100))
    overlap = pairwise_iou(every.boxes, every.boxes) - np.eye(len(every))
    assert len(every) > 8 and overlap.max() < SAME_PLACE + 1e-3
    assert (np.diff(every.predictions.scores) <= 0).all()
    middle = float(every.predictions.scores[4])
    some = by_score(source.detector, input_of("0"), SelectionRule(middle, 2, 100))
    assert np.array_equal(some.boxes, every.boxes[every.predictions.scores >= middle])


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
    assert np.array_equal(regions.predictions.scores, scores[expected])
    assert np.array_equal(regions.predictions.classes, found.classes[0].numpy()[expected])
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
        RegionExtractor(bare, ExtractionConfig("score", attributes=True))


@pytest.mark.parametrize("features_of", ["final", "proposal"])
def test_one_image_has_the_regions_of_bulk_extraction(source, folder: Path, tmp_path: Path, features_of):
    detector = changed(source.detector, {"MODEL.ROI_HEADS.FEATURES_OF": features_of})
    source = dataclasses.replace(source, detector=detector)
    settings = ExtractionConfig("score", RULE, features_of)
    job = ExtractionJob(list_images(folder), tmp_path / "out", "npz", source, settings, batch_size=1, workers=0)
    extract_images(job, make_accelerator("no"))
    store = open_features(job.output)
    for record in map(store.read, store.ids):
        single = extract_image(folder / f"{record.image_id}.png", source, RULE)
        assert single.image_id == record.image_id
        columns = single.columns()
        for name, column in record.columns().items():
            assert np.array_equal(columns[name], column), name


def test_limit_of_proposals(config_file: Path, folder: Path):
    source = open_detector(config_file, None, max_proposals=4)
    assert 0 < len(extract_image(folder / "0.png", source, SelectionRule(0.0, 0, 36))) <= 4
    assert source.detector.config.rpn.post_nms_topk_test == 4


def test_detector_of_a_run(trained_run, tmp_path: Path):
    folder = shutil.copytree(trained_run.path / "model", tmp_path / "run" / "model")
    sizes = {"short_edge": [48, 64], "long_edge": 80, "rounding": "truncate", "library": "torch"}
    save_config(replaced(trained_run.config, data={"resize": sizes}), folder / "config.yaml")
    for path in (tmp_path / "run", folder):
        source = detector_of_run(path)
        assert source.resize == ResizeRule(64, 80, "truncate", "torch")
        assert source.weights == folder / "detector" / "model.safetensors"
        assert same(source.detector, trained_run.model.detector)
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        detector_of_run(tmp_path)


# Many images


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


@pytest.mark.parametrize("layout", ["npz", "hdf5"])
def test_other_images_with_the_same_ids_need_another_output(make_job, tmp_path, layout):
    extract(make_job(layout))
    (tmp_path / "others").mkdir()
    job = make_job(layout)
    for image in job.images:
        Image.new("RGB", (33, 55)).save(tmp_path / "others" / image.path.name)
    with refused("another image 0", "others/0.png"):
        extract(make_job(layout, images=list_images(tmp_path / "others")))
    assert extract(job).existing == 5
    if layout == "npz":
        (job.output / "stamp.json").unlink()
        with refused("no stamp.json"):
            extract(job)


def described_again(source, image, boxes: np.ndarray) -> np.ndarray:
    """Features of boxes, in pixels of the original image, from the detector's own call."""
    resized = resize_boxes(boxes, image.original_size, image.pixels.shape[:2])
    with torch.no_grad():
        return source.detector(network_input(source, image), [torch.from_numpy(resized)]).features[0].numpy()


@pytest.mark.parametrize(
    "settings",
    [
        ExtractionConfig("score", SelectionRule(0.0, 6, 6)),
        ExtractionConfig("maxconf", SelectionRule(0.5, 3, 8), "proposal", attributes=True),
        ExtractionConfig("maxconf", SelectionRule(0.5, 3, 8), "final"),
        ExtractionConfig("maxnms", SelectionRule(0.0, 7, 7), "final", attributes=True),
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
        assert (record.predictions.attributes is None) is not settings.attributes
        if settings.features_of == "proposal":
            logits = source.detector.roi_heads.box_predictor.class_logits(torch.from_numpy(record.features))
            best = logits.softmax(dim=1)[:, :-1].max(dim=1)
            assert np.array_equal(best.indices.numpy(), record.predictions.classes)
            assert np.allclose(best.values.detach().numpy(), record.predictions.scores, atol=1e-5)


def test_given_boxes(make_job, source, input_of):
    boxes = np.array([[3.2, 4, 50, 60.7], [0, 0, 200, 300], [10, 10, 12, 30]])
    given = {"0": GivenBoxes(boxes, np.array([5, 4, 9])), "3": GivenBoxes(boxes + 500, np.array([1, 2, 3]))}
    settings = ExtractionConfig("given", image_feature=True)
    summary = extract(make_job("hdf5", settings=settings, given_boxes=given))
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


def test_given_boxes_of_a_photo_annotated_without_its_exif_rotation(make_job, tmp_path):
    job = make_job("npz", settings=ExtractionConfig("given"))
    photo = job.images[0]
    with Image.open(photo.path) as image:
        stored, size = image.convert("RGB"), (image.height, image.width)
    exif = Image.Exif()
    exif[0x0112] = 6
    boxes = GivenBoxes(np.array([[3.2, 4, 50, 60.7]]), np.array([5]), size)
    seen = {}
    for name, options in (("plain", {}), ("rotated", {"exif": exif})):
        path = tmp_path / f"{name}.png"
        stored.save(path, **options)
        images = [ListedImage(name, path)]
        extract(dataclasses.replace(job, images=images, given_boxes={name: boxes}, output=job.output.with_name(name)))
        seen[name] = open_features(job.output.with_name(name))[name]
    assert seen["plain"].image_size == seen["rotated"].image_size == size
    np.testing.assert_array_equal(seen["plain"].features, seen["rotated"].features)
    other = dataclasses.replace(job, output=job.output.with_name("other"), images=[photo])
    wrong = dataclasses.replace(boxes, annotated_size=(9, 9))
    [failure] = extract(dataclasses.replace(other, given_boxes={photo.id: wrong})).failures.values()
    assert "9 x 9" in failure


def test_two_extractions_to_one_output_are_refused(make_job):
    job = make_job("hdf5")
    job.folder.mkdir()
    with FileLock(job.folder / LOCK_FILE), pytest.raises(UserError, match="is in use by another extraction"):
        extract(job)
    assert extract(job).extracted == 5 and not job.folder.exists()


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
    left = make_job(layout).folder / ".1.npz.12.34.part"
    left.write_text("cut off")
    summary = extract(make_job(layout, images=list_images(mixed)))
    assert (summary.existing, summary.extracted, summary.failures) == (4, 1, {}) and not left.exists()
    assert open_features(make_job(layout).output).ids == ["0", "1", "2", "3", "4"]


def test_other_settings_need_another_output(make_job):
    extract(make_job())
    extract(make_job("tsv"))
    other = ExtractionConfig("score", SelectionRule(0.0, 4, 5))
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
