"""From facts about images to pixels, boxes and masks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.config import SelectionRule
from detector.errors import UserError
from e2e_vl.config import BoxSource
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.data.image_loader import (
    Augmentation,
    BoxReader,
    DetectedBoxes,
    instance_mask,
    open_boxes,
    open_boxes_of,
    read_detections,
)
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.samples import AnnotatedObjects, BrokenImageError, CandidateBoxes, ImageBytes, ImageKey, SampleImage
from e2e_vl.transforms import ImageTransform, LoadedImage
from tests.data.helpers import DOUBLE, SAME, make_loader, open_dataset, refused, with_files, write_json
from tests.data.tiny_refcoco import DETECTIONS_7, GT_7, detection

ALL = SelectionRule(min_score=0.0, min_regions=0, max_regions=100)
BY_SCORE = DETECTIONS_7[::-1]
BETTER = SelectionRule(min_score=0.5, min_regions=1, max_regions=100)
BOXES = np.array([[0, 0, 9, 9], [10, 10, 40, 40], [5, 5, 60, 60]], dtype=np.float32)  # in files of features
SCORES = np.array([0.2, 0.9, 0.6], dtype=np.float32)
FEATURES = np.eye(3, dtype=np.float32)


@pytest.fixture
def photo(tiny) -> SampleImage:
    """Photo 7, 100 x 60 pixels."""
    objects = CocoInstances(tiny.instances_file).objects(7)
    return SampleImage("7", tiny.images_root / "seven.png", (60, 100), objects)


def load(image: SampleImage, *args, flip: bool = False, **rules) -> LoadedImage:
    loader = make_loader(*args, **rules)
    return loader.load(image, Augmentation(flip, loader.rules.resize[0]))


def detections(tiny, selection: SelectionRule = BETTER) -> BoxReader:
    return open_boxes([tiny.detections_file], selection, with_features=False)


def test_pixels_boxes_and_names(photo):
    image = load(photo, resize=DOUBLE)
    assert image.pixels.shape == (120, 200, 3) and image.pixels.dtype == np.uint8
    assert image.image_transform == ImageTransform((60, 100), (120, 200), False)
    assert image.name.endswith("seven.png")
    np.testing.assert_array_equal(image.boxes, [[20, 40, 60, 80], [120, 20, 180, 80], [0, 0, 199, 119]])
    assert image.box_ids == (100, 101, 102) and image.box_classes.tolist() == [0, 0, 1]
    assert image.objects is None and image.roi_masks is None and image.boxes_to_mask is None
    np.testing.assert_array_equal(image.pixels[60, 40], [60, 30, 100])  # object 100 is drawn in RGB (100, 30, 60)
    rgb = load(photo, resize=DOUBLE, channel_order="RGB").pixels
    np.testing.assert_array_equal(rgb[:, :, ::-1], image.pixels)


def test_the_content_of_an_archive_and_a_file_that_is_looked_up_late(photo):
    encoded = ImageBytes(photo.file.read_bytes(), "a.tar: seven.png")
    image = load(dataclasses.replace(photo, file=lambda: encoded))
    np.testing.assert_array_equal(image.pixels, load(photo).pixels)
    assert image.name == "a.tar: seven.png"
    assert load(dataclasses.replace(photo, file=lambda: photo.file)).name == str(photo.file)


@pytest.mark.parametrize(("order", "colour"), [("RGB", [123, 116, 103]), ("BGR", [103, 116, 123])])
def test_a_blank_image_keeps_boxes_and_size(photo, order, colour):
    plain = load(photo, channel_order=order)
    blank = load(photo, channel_order=order, is_blank=True)
    assert blank.pixels.shape == plain.pixels.shape and blank.pixels.dtype == np.uint8
    assert (blank.pixels == np.array(colour)).all()
    np.testing.assert_array_equal(blank.boxes, plain.boxes)


def test_a_blank_image_may_lose_its_boxes(photo):
    blank = load(photo, is_blank=True, blank_boxes=True, with_objects=True)
    assert blank.boxes.shape == (0, 4) and blank.box_classes.shape == (0,) and blank.box_ids is None
    assert len(blank.objects.boxes) == 2, "targets of the detection losses are no input"
    np.testing.assert_array_equal(load(photo, blank_boxes=True).boxes, GT_7)
    assert load(photo, "online", is_blank=True, blank_boxes=True).boxes is None


def test_a_flip_moves_pixels_boxes_and_objects(photo):
    plain, mirrored = load(photo, with_objects=True), load(photo, with_objects=True, flip=True)
    assert mirrored.image_transform.flipped
    np.testing.assert_array_equal(mirrored.pixels, plain.pixels[:, ::-1])
    np.testing.assert_array_equal(mirrored.boxes, [[69, 20, 89, 40], [9, 10, 39, 40], [0, 0, 99, 59]])
    # x' = width - 1 - x for candidates (official VL-BERT code), width - x for the detector's targets (Detectron2)
    np.testing.assert_array_equal(mirrored.objects.boxes, [[70, 20, 90, 40], [10, 10, 40, 40]])


def test_flip_and_size_are_drawn():
    def drawn(**rules) -> set[Augmentation]:
        return {make_loader(**rules).draw_augmentation(np.random.default_rng(seed)) for seed in range(40)}

    every = {Augmentation(flip, resize) for flip in (False, True) for resize in (SAME, DOUBLE)}
    assert drawn(resize=(SAME, DOUBLE), flip_probability=0.5) == every
    assert drawn(flip_probability=1.0) == {Augmentation(True, SAME)}
    assert drawn(flip_probability=0.0) == {Augmentation(False, SAME)}


@pytest.mark.parametrize(
    ("source", "boxes"), [("gt", GT_7), ("detections", BY_SCORE), ("detections+gt", BY_SCORE + GT_7)]
)
def test_box_sources(tiny, photo, source, boxes):
    image = load(photo, source, detections(tiny, ALL) if "detections" in source else None)
    np.testing.assert_array_equal(image.boxes, boxes)
    assert image.boxes.dtype == np.float32
    # of other boxes neither ids nor classes are known
    assert (image.box_ids is not None) == (image.box_classes is not None) == (source == "gt")
    assert load(photo, "online").boxes is None


def test_some_of_the_objects_are_candidates(photo):
    image = load(dataclasses.replace(photo, candidates=(2, 0)), with_objects=True)
    np.testing.assert_array_equal(image.boxes, [GT_7[2], GT_7[0]])
    assert image.box_ids == (102, 100) and image.box_classes.tolist() == [1, 0]
    assert len(image.objects.boxes) == 2, "the others are still targets of the detection losses"
    assert load(dataclasses.replace(photo, candidates=())).boxes.shape == (0, 4)


@pytest.mark.parametrize("source", ["gt", "detections+gt"])
def test_boxes_that_come_with_a_sample_go_before_every_other_source(tiny, photo, source):
    probabilities = np.array([[0.25, 0.75]], dtype=np.float32)
    boxes = CandidateBoxes(np.array([[1.0, 2, 30, 40]]), "--boxes", class_probs=probabilities)
    image = load(dataclasses.replace(photo, boxes=boxes), source, detections(tiny), resize=DOUBLE)
    np.testing.assert_array_equal(image.boxes, [[2, 4, 60, 80]])
    np.testing.assert_array_equal(image.class_probs, probabilities)


def test_a_box_outside_its_image_is_named(tiny, photo):
    tiny.detections[1]["box"] = [101, 5, 10, 10]
    with refused("dets.json", "image 7", "box 1", "100 x 60"):
        load(photo, "detections", detections(tiny.write(), ALL))


def test_detections_in_other_units(tiny, caplog):
    boxes = [row["box"] for row in tiny.detections]
    files = tiny.settings
    dataset = open_dataset(RefCOCODataset, files, "train", "detections")
    open_boxes_of(dataset, files, BoxSource.DETECTIONS)
    assert not caplog.records
    for row, (x, y, width, height) in zip(tiny.detections, boxes, strict=True):
        row["box"] = [x, y, x + width, y + height]
    tiny.write()
    open_boxes_of(dataset, files, BoxSource.DETECTIONS)
    [record] = caplog.records
    assert "dets.json: 1 of 3 boxes reach outside" in record.getMessage() and "corners" in record.getMessage()
    for row in tiny.detections:
        row["box"] = [0.1, 0.2, 0.5, 0.6]
    tiny.write()
    with refused("dets.json", "normalised", "pixels"):
        open_boxes_of(dataset, files, BoxSource.DETECTIONS)


def test_a_data_set_without_split_values_reads_one_file_for_all_splits(tiny):
    dataset = open_dataset(RefCOCODataset, tiny.settings, "train", "detections")
    del dataset.split_values
    reader = open_boxes_of(dataset, tiny.settings, BoxSource.DETECTIONS)
    assert reader.files == [tiny.detections_file] and "7" in reader
    by_split = with_files(tiny.settings, detections="dets_{split}.json")
    with refused("data.files.detections", "RefCOCODataset", "split_values"):
        open_boxes_of(dataset, by_split, BoxSource.DETECTIONS)


def test_boxes_to_mask_move_with_the_image(photo):
    hide = np.array([[10.0, 0, 20, 60]])
    image = load(dataclasses.replace(photo, boxes_to_mask=hide), "online", resize=DOUBLE, flip=True)
    np.testing.assert_array_equal(image.boxes_to_mask, [[159, 0, 179, 119]])
    nothing = load(dataclasses.replace(photo, boxes_to_mask=np.zeros((0, 4))), "online")
    assert nothing.boxes_to_mask.shape == (0, 4), "exactly nothing is to be masked"


def test_objects_are_the_annotations_without_crowds(photo):
    objects = load(photo, "online", with_objects=True).objects
    np.testing.assert_array_equal(objects.boxes, GT_7[:2])
    assert objects.boxes.dtype == np.float32
    np.testing.assert_array_equal(objects.classes, [0, 0])
    np.testing.assert_array_equal(objects.attributes, [[1, -1], [0, 2]])


def test_objects_are_clipped_to_the_image(tiny, photo):
    tiny.instances["annotations"][0]["bbox"] = [-10, 20, 130, 50]  # of a 100 x 60 image
    objects = CocoInstances(tiny.write().instances_file).objects(7)
    image = load(dataclasses.replace(photo, objects=objects), with_objects=True, resize=DOUBLE)
    np.testing.assert_allclose(image.objects.boxes[0], [0, 40, 200, 120])
    np.testing.assert_allclose(image.boxes[0], [0, 40, 199, 119])


def test_an_object_that_vanishes_is_named(photo):
    thin = AnnotatedObjects(np.array([[-5.0, 0, 0, 60]]), "i.json: image 7", np.zeros(1, dtype=np.int64))
    with refused("i.json", "image 7", "object 0"):
        load(dataclasses.replace(photo, objects=thin), "online", with_objects=True)


def with_outlines(photo: SampleImage, *outlines: list) -> SampleImage:
    arrays = []
    for outlines_of_object in outlines:
        arrays.append([np.array(outline, dtype=float) for outline in outlines_of_object])
    return dataclasses.replace(photo, objects=dataclasses.replace(photo.objects, outlines=arrays))


LEFT_HALF = [[10, 20], [19, 20], [19, 40], [10, 40]]
SQUARE = [[60, 10], [90, 10], [90, 40], [60, 40]]
CORNER = [[0, 0], [50, 0], [0, 30]]


def test_masks_of_the_candidates(photo):
    photo = with_outlines(photo, [LEFT_HALF], [SQUARE], [CORNER])
    masks = load(photo, mask_size=14).roi_masks
    assert masks.shape == (3, 14, 14) and masks.dtype == np.float32
    assert masks[0, :, :4].all() and not masks[0, :, 8:].any()
    assert masks[1].all()
    np.testing.assert_array_equal(load(photo, mask_size=14, flip=True).roi_masks, masks[:, :, ::-1])
    chosen = load(dataclasses.replace(photo, candidates=(2, 0)), mask_size=14).roi_masks
    np.testing.assert_array_equal(chosen, masks[[2, 0]])
    np.testing.assert_array_equal(load(photo, mask_size=14, resize=DOUBLE).roi_masks, masks)


def test_masks_are_left_out_or_blank(tiny, photo):
    assert load(photo, mask_size=14).roi_masks is None, "nothing has an outline"
    filled = load(photo, mask_size=14, fill_masks=True).roi_masks
    assert filled.shape == (3, 14, 14) and (filled == 1).all()
    photo = with_outlines(photo, [LEFT_HALF], [SQUARE], [CORNER])
    assert load(photo).roi_masks is None
    assert load(photo, "detections+gt", detections(tiny), mask_size=14).roi_masks is None
    assert load(photo, mask_size=14, is_blank=True).roi_masks.all(), "outlines tell shapes"
    nothing = load(dataclasses.replace(photo, candidates=()), mask_size=14)
    assert nothing.roi_masks.shape == (0, 14, 14)


def test_the_first_object_without_an_outline_is_logged(photo, caplog):
    photo = with_outlines(photo, [LEFT_HALF], [], [[[3, 3], [9, 30]]])  # nothing, and a line
    loader = make_loader(mask_size=14)
    for _ in range(2):
        masks = loader.load(photo, Augmentation(False, SAME)).roi_masks
        assert masks.any(axis=(1, 2)).tolist() == [True, False, False]
    [record] = caplog.records
    assert "image 7: the outline of object 1" in record.getMessage()


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_photo_annotated_without_its_exif_rotation_is_as_annotated(tiny, photo, tmp_path, orientation):
    """Pixels, candidates, objects, masks and boxes to mask are what they would be without EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    with Image.open(photo.file) as stored:
        stored.save(tmp_path / "seven.png", exif=exif)
    photo = with_outlines(photo, [LEFT_HALF], [SQUARE], [CORNER])
    photo = dataclasses.replace(photo, boxes_to_mask=np.array([GT_7[1]]))
    rotated = dataclasses.replace(photo, file=tmp_path / "seven.png")
    for flip in (False, True):
        rules = {"resize": DOUBLE, "flip": flip, "with_objects": True, "mask_size": 14}
        expected, example = load(photo, **rules), load(rotated, **rules)
        example.name = expected.name
        np.testing.assert_equal(dataclasses.asdict(example), dataclasses.asdict(expected))
    upright = dataclasses.replace(rotated, size=(100, 60), objects=None, boxes_to_mask=None)
    assert load(upright, "online").image_transform.original_size == (100, 60)
    with refused("seven.png", "99 x 60"):
        load(dataclasses.replace(rotated, size=(60, 99)))


@pytest.fixture
def store(tmp_path):
    def write(*ids: str, boxes=BOXES, features=FEATURES, scores=SCORES, image_feature=None, **columns) -> Path:
        (tmp_path / "features").mkdir(exist_ok=True)
        for image_id in ids:
            columns |= {"boxes": boxes, "features": features}
            if scores is not None:
                columns["scores"] = scores[: len(boxes)]
            record = RegionFeatures.from_columns(image_id, (60, 100), columns, image_feature)
            save_npz(tmp_path / "features" / f"{image_id}.npz", record)
        return tmp_path / "features"

    return write


@pytest.fixture
def features(store) -> BoxReader:
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    return open_boxes([store("7", boxes=BOXES[:2], features=values, scores=None)], ALL, with_features=True)


def test_precomputed_features_need_no_pixels(photo, features):
    photo.file.unlink()
    image = load(photo, "precomputed", features, resize=DOUBLE)
    assert image.features.shape == (2, 4) and image.image_feature is None
    np.testing.assert_array_equal(image.boxes, BOXES[:2] * 2)
    assert image.pixels.shape == (120, 200, 3) and image.pixels.strides[:2] == (0, 0), "a shape without memory"
    assert image.image_transform.original_size == (60, 100) and image.name == str(photo.file)


def test_the_mean_of_the_regions_may_stand_for_the_whole_image(photo, features):
    def image_feature(**changes) -> list[float]:
        image = dataclasses.replace(photo, **changes)
        reader = None if changes else features
        return load(image, "precomputed", reader, mean_image_feature=True).image_feature.tolist()

    assert image_feature() == [2, 3, 4, 5]
    empty = CandidateBoxes(np.zeros((0, 4)), "f", image_size=(60, 100), features=np.zeros((0, 4), dtype=np.float32))
    assert image_feature(boxes=empty) == [0, 0, 0, 0]
    stated = dataclasses.replace(empty, image_feature=np.ones(4, dtype=np.float32))
    assert image_feature(boxes=stated) == [1, 1, 1, 1]


def test_mirrored_precomputed_features(photo, features):
    """As in the official code: boxes (and words) are mirrored, features are not."""
    with refused("data.flip"):
        make_loader("precomputed", features, flip_probability=0.5)
    image = load(photo, "precomputed", features, flip=True, mirror_precomputed=True, flip_probability=1.0)
    np.testing.assert_array_equal(image.boxes[0], [90, 0, 99, 9])
    assert image.features[0, 0] == 0 and image.image_transform.flipped


def test_blank_features(photo, features):
    blank = load(photo, "precomputed", features, is_blank=True, mean_image_feature=True)
    assert not blank.features.any() and not blank.image_feature.any() and blank.boxes.shape == (2, 4)
    assert len(np.unique(blank.pixels.reshape(-1, 3), axis=0)) == 1
    nothing = load(photo, "precomputed", features, is_blank=True, blank_boxes=True)
    assert nothing.boxes.shape == (0, 4) and nothing.features.shape == (0, 4)


def test_images_that_cannot_be_read_are_told_from_wrong_sizes(photo):
    with pytest.raises(UserError, match=r"seven\.png.*image 7.*100 x 60.*101 x 60"):
        load(dataclasses.replace(photo, size=(60, 101)))
    photo.file.write_bytes(b"no image")
    with pytest.raises(BrokenImageError) as damaged:
        load(photo)
    photo.file.unlink()
    with pytest.raises(BrokenImageError) as missing:
        load(photo)
    for caught, kind in ((damaged, UserError), (missing, FileNotFoundError)):
        assert isinstance(caught.value.__cause__, kind) and "seven.png" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("source", "rules", "part"),
    [
        ("gt", {}, "data.files.instances"),
        ("detections+gt", {}, "data.files.detections"),
        ("detections", {}, "data.files.detections"),
        ("precomputed", {}, "data.files.features"),
        ("online", {"with_objects": True}, "detection losses"),
    ],
)
def test_a_source_without_its_file_is_not_replaced_by_another(photo, source, rules, part):
    if source in ("gt", "online"):
        photo = dataclasses.replace(photo, objects=None)
    with refused("image 7", part):
        load(photo, source, **rules)


@pytest.mark.parametrize("with_features", [True, False])
def test_features_of_an_image_of_another_size(photo, features, with_features):
    features.with_features = with_features
    source = "precomputed" if with_features else "detections"
    with refused("image 7", "100 x 60", "50 x 60"):
        load(dataclasses.replace(photo, size=(60, 50)), source, features)


def test_grid_points_on_the_outline_count():
    """A box of 13 x 13 pixels has a grid point per pixel: coordinates are multiplied by 14 / (13 + 1)."""
    square = np.array([[2, 1], [5, 1], [5, 3], [2, 3]])
    mask = instance_mask([square], np.array([0, 0, 13, 13]))
    assert mask.shape == (14, 14) and mask.dtype == np.float32
    assert (np.argwhere(mask).min(0).tolist(), np.argwhere(mask).max(0).tolist()) == ([1, 2], [3, 5])
    assert mask.sum() == 3 * 4


def test_a_slanted_outline():
    triangle = np.array([[0, 0], [5.5, 0.2], [0.3, 5]])  # as `skimage.draw.polygon` draws it
    mask = instance_mask([triangle], np.array([0, 0, 5, 5]), side=6)
    drawn = ["".join("#" if value else "." for value in row) for row in mask]
    assert drawn == ["#.....", ".####.", ".###..", ".##...", ".#....", "......"]


def test_the_hole_of_a_crossing_outline():
    """Where an outline runs around a point twice, the point is outside: the even-odd rule."""
    twice = np.array([[1, 1], [11, 1], [11, 11], [1, 11], [1, 1], [4, 4], [8, 4], [8, 8], [4, 8], [4, 4]])
    mask = instance_mask([twice], np.array([0, 0, 13, 13]))
    assert mask[2, 2] and not mask[6, 6]


@pytest.mark.parametrize("points", [[[3, 3]], [[3, 3], [6, 3]]])
def test_outlines_without_area(points):
    mask = instance_mask([np.array(points)], np.array([0, 0, 13, 13]))
    assert np.argwhere(mask)[:, ::-1].min(0).tolist() == [3, 3]
    assert np.argwhere(mask)[:, ::-1].max(0).tolist() == points[-1]


def test_centres_of_cells():
    triangle = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    mask = instance_mask([triangle], np.array([0, 0, 4, 4]), side=4, at="centres")
    inside = np.add.outer(np.arange(4), np.arange(4)) < 3  # the centres of the diagonal lie on the outline
    np.testing.assert_array_equal(mask.astype(bool)[inside], True)
    np.testing.assert_array_equal(mask[np.add.outer(np.arange(4), np.arange(4)) > 3], 0)
    whole = np.array([[10.0, 20.0], [18.0, 20.0], [18.0, 24.0], [10.0, 24.0]])
    assert instance_mask([whole], np.array([10, 20, 18, 24]), at="centres").all()
    left = instance_mask([whole - [4, 0]], np.array([10, 20, 18, 24]), side=4, at="centres")
    np.testing.assert_array_equal(left, [[1, 1, 0, 0]] * 4)
    twice = np.concatenate([whole, whole])
    assert not instance_mask([twice], np.array([10, 20, 18, 24]), at="centres").any()  # even-odd
    assert not instance_mask([], np.array([0, 0, 4, 4]), at="centres").any()


def test_detections_without_an_area_are_skipped_and_counted(tmp_path, caplog):
    rows = [{"image_id": 7, "box": box, "score": 0.5} for box in ([1, 2, 30, 0], [1, 2, 30, 40], [5, 6, 0, 9])]
    path = tmp_path / "dets.json"
    path.write_text(json.dumps(rows))
    assert read_detections(path)["7"][0].tolist() == [[1, 2, 31, 42]]
    assert "skipped 2 detections with an empty box: 0; 2" in caplog.text


def test_detections_come_by_falling_score_as_the_rule_keeps_them(tiny, tmp_path):
    boxes = DetectedBoxes([tiny.detections_file], SelectionRule(min_score=0.0)).read("7")
    assert boxes.origin == f"{tiny.detections_file}: image 7"
    assert boxes.features is boxes.class_probs is boxes.image_size is None
    rows = [detection(0, 12, [0, 0, 5, 5], 0.9), detection(1, 7, [0, 0, 6, 6], 0.9)]
    files = [tiny.detections_file, write_json(tmp_path / "more.json", rows)]
    reader = open_boxes(files, BETTER, with_features=False)
    np.testing.assert_array_equal(reader.read("12").boxes, [[0, 0, 5, 5]])
    np.testing.assert_array_equal(reader.read("7").boxes, [DETECTIONS_7[1]], "the first file that has it")
    with refused("dets.json", "features"):
        open_boxes(files, BETTER, with_features=True)


def test_images_without_boxes_are_named_and_counted(tiny, store):
    for reader, name in (
        (open_boxes([tiny.detections_file], BETTER, with_features=False), "dets.json"),
        (open_boxes([store("7", "3", "9")], BETTER, with_features=True), "features"),
    ):
        loader = make_loader("detections", reader)
        loader.require_images([ImageKey(0, image_id) for image_id in ("3", "7", "9")], "train")
        with refused(name, "image 12 ", "1 more", "train"):
            loader.require_images([ImageKey(0, image_id) for image_id in ("3", "12", "13")], "train")
        with refused(name, "image 12"):
            reader.read("12")
    make_loader("gt").require_images([ImageKey(0, "12")], "val")


def test_features_that_were_detected_come_by_falling_score(store):
    boxes = open_boxes([store("7")], BETTER, with_features=False).read("7")
    np.testing.assert_array_equal(boxes.boxes, BOXES[[1, 2]])
    assert boxes.features is None and boxes.image_size == (60, 100)
    whole = open_boxes([store("7")], BETTER, with_features=True).read("7")
    np.testing.assert_array_equal(whole.boxes, BOXES[[1, 2, 0]])
    np.testing.assert_array_equal(whole.features, np.eye(3)[[1, 2, 0]])
    assert whole.image_feature is None
    np.testing.assert_array_equal(boxes.predictions.scores, SCORES[[1, 2]])
    np.testing.assert_array_equal(whole.predictions.scores, SCORES[[1, 2, 0]])


@pytest.mark.parametrize("columns", [{"scores": None}, {"box_ids": np.array([5, 6, 7])}])
def test_features_of_given_boxes_keep_their_order(store, columns):
    path = store("7", image_feature=np.ones(3, dtype=np.float32), **columns)
    np.testing.assert_array_equal(open_boxes([path], BETTER, with_features=False).read("7").boxes, BOXES)
    whole = open_boxes([path], BETTER, with_features=True).read("7")
    np.testing.assert_array_equal(whole.boxes, BOXES)
    np.testing.assert_array_equal(whole.features, np.eye(3))
    np.testing.assert_array_equal(whole.image_feature, [1, 1, 1])


@pytest.mark.parametrize(
    ("change", "key"),
    [({"box": [1, 1, -2, 5]}, "detection 1"), ({"box": [1, 1]}, "[1].box"), ({"score": 7}, "[1].score")],
)
def test_a_bad_detection_is_named(tiny, change, key):
    tiny.detections[1].update(change)
    with refused("dets.json", key):
        read_detections(tiny.write().detections_file)
