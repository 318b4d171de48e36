from __future__ import annotations

import numpy as np
import pytest
import torch

from detector.images import ResizeRule
from e2e_vl.data.collate import collate
from e2e_vl.data.examples import Example, ImageExample, Objects, Request, TextExample
from e2e_vl.data.refcoco import RefCOCODataset

MEAN, STD = (10.0, 20.0, 30.0), (1.0, 2.0, 4.0)


def image(height=4, width=6, boxes=2, objects=None, masks=None, value=50) -> ImageExample:
    return ImageExample(
        pixels=np.full((height, width, 3), value, dtype=np.uint8),
        original_size=(2 * height, 2 * width),
        name=f"photo_{height}x{width}",
        boxes=None if boxes is None else np.arange(4 * boxes, dtype=np.float32).reshape(boxes, 4),
        objects=objects,
        pixel_masks=masks,
    )


def text(length=3, looks_at=(0,), **changes) -> TextExample:
    fields = {
        "input_ids": np.arange(5, 5 + length),
        "segment_ids": np.zeros(length, dtype=np.int64),
        "looks_at": looks_at,
        "targets": {"box": np.full(4, length, dtype=np.float32)},
        "record": {"length": length},
    }
    return TextExample(**{**fields, **changes})


def join(*examples, **options):
    return collate(examples, MEAN, STD, **options)


def test_images_are_padded_and_texts_point_at_their_rows():
    batch = join(
        Example([image(4, 6)], [text(3), text(2)]),
        Example([image(5, 3), image(2, 2)], [text(4, (0, 1)), text(1, (1,)), text(1, ())]),
    )
    assert batch.images.pixels.shape == (3, 3, 5, 6)
    assert batch.images.sizes.tolist() == [[4, 6], [5, 3], [2, 2]]
    assert batch.images.original_sizes.tolist() == [[8, 12], [10, 6], [4, 4]]
    assert batch.images.names == ["photo_4x6", "photo_5x3", "photo_2x2"]
    np.testing.assert_array_equal(batch.images.pixels[0, :, 0, 0], [40, 15, 5])
    assert batch.images.pixels[0, :, 4].abs().sum() == 0
    assert batch.looks_at.tolist() == [[0, -1], [0, -1], [1, 2], [2, -1], [-1, -1]]
    assert batch.texts.attend.sum(1).tolist() == [3, 2, 4, 1, 1]
    assert batch.targets["box"][:, 0].tolist() == [3, 2, 4, 1, 1]
    assert batch.targets["box"].dtype == torch.float32
    assert [record["length"] for record in batch.records] == [3, 2, 4, 1, 1]
    assert [len(boxes) for boxes in batch.boxes] == [2, 2, 2]
    assert batch.detection_targets is None
    assert batch.pixel_masks is None
    assert len(batch) == 5


def test_pad_to_fixes_the_size():
    assert join(Example([image()], [text()]), pad_to=(8, 9)).images.pixels.shape == (1, 3, 8, 9)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(4, 6), (7, 8)], (8, 10)),
        ([(5, 5)], (8, 10)),  # a square image lies as a wide one
        ([(6, 4)], (10, 8)),
        ([(4, 6), (6, 4)], (10, 10)),
        ([(4, 20)], (8, 20)),  # a canvas grows with its image
        ([(9, 4), (12, 11)], (12, 11)),
    ],
)
def test_images_lie_on_a_canvas(sizes, expected):
    batch = join(*(Example([image(*size)], [text()]) for size in sizes), canvas=(8, 10))
    assert batch.images.pixels.shape == (len(sizes), 3, *expected)
    assert batch.images.sizes.tolist() == [list(size) for size in sizes]
    for pixels, (height, width) in zip(batch.images.pixels, sizes, strict=True):
        assert pixels[:, :height, :width].abs().min() > 0
        assert pixels[:, height:].abs().sum() == pixels[:, :, width:].abs().sum() == 0


def test_a_canvas_makes_an_image_independent_of_others_that_lie_as_it_does():
    one, other = Example([image(4, 6)], [text()]), Example([image(5, 9)], [text()])
    alone, together = join(one, canvas=(8, 10)).images.pixels, join(one, other, canvas=(8, 10)).images.pixels
    assert torch.equal(alone[0], together[0])
    assert join(one).images.pixels.shape != join(one, other).images.pixels.shape
    assert join(one, canvas=(8, 10), pad_to=(4, 7)).images.pixels.shape == (1, 3, 4, 7)


def test_online_boxes_are_none_and_no_boxes_are_empty():
    assert join(Example([image(boxes=None)], [text()])).boxes is None
    assert join(Example([image(boxes=0)], [text()])).boxes[0].shape == (0, 4)


def test_precomputed_features_come_without_pixels():
    one, two = image(4, 6, boxes=2), image(5, 3, boxes=0)
    one.features, two.features = np.ones((2, 7), dtype=np.float32), np.zeros((0, 7), dtype=np.float32)
    images = join(Example([one], [text()]), Example([two], [text()])).images
    assert images.pixels.shape == (2, 3, 0, 0) and len(images) == 2
    assert images.sizes.tolist() == [[4, 6], [5, 3]] and images.original_sizes.tolist() == [[8, 12], [10, 6]]
    moved = images.to("cpu").precomputed
    assert [rows.shape for rows in moved.features] == [(2, 7), (0, 7)] and moved.image_features is None
    with pytest.raises(ValueError, match="photo_4x6 comes with precomputed features, photo_2x2 without"):
        join(Example([one, image(2, 2)], [text()]))
    one.image_feature = np.ones(7, dtype=np.float32)
    with pytest.raises(ValueError, match="a feature of the whole image, photo_5x3 without"):
        join(Example([one, two], [text()]))


def test_detection_targets_pad_attributes_to_the_most_slots():
    one = Objects(np.ones((1, 4), np.float32), np.array([3]), np.array([[5, 6]]))
    none = Objects(np.ones((0, 4), np.float32), np.array([], dtype=np.int64), np.zeros((0, 1), np.int64))
    two = Objects(np.ones((2, 4), np.float32), np.array([0, 1]), np.array([[7], [-1]]))
    targets = join(*(Example([image(objects=o)], [text()]) for o in (one, none, two))).detection_targets
    assert [boxes.shape for boxes in targets.boxes] == [(1, 4), (0, 4), (2, 4)]
    assert [classes.tolist() for classes in targets.classes] == [[3], [], [0, 1]]
    assert [attributes.tolist() for attributes in targets.attributes] == [[[5, 6]], [], [[7, -1], [-1, -1]]]
    assert targets.attributes[1].shape == (0, 2)
    plain = Objects(np.ones((1, 4), np.float32), np.array([3]))
    assert join(Example([image(objects=plain)], [text()])).detection_targets.attributes is None


def test_pixel_masks_of_some_images_are_empty_for_the_others():
    masks = np.array([[0, 0, 2, 2]], dtype=np.float32)
    batch = join(Example([image(masks=masks)], [text()]), Example([image()], [text()]))
    assert [mask.tolist() for mask in batch.pixel_masks] == [[[0, 0, 2, 2]], []]
    assert batch.pixel_masks[1].shape == (0, 4)


OBJECTS = Objects(np.ones((1, 4), np.float32), np.array([3]))
WITH_ATTRIBUTES = Objects(np.ones((1, 4), np.float32), np.array([3]), np.array([[1]]))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            Example([image()], [text()]),
            Example([image(2, 2, boxes=None)], [text()]),
            "photo_4x6 comes with candidate boxes",
        ),
        (
            Example([image(2, 2, objects=OBJECTS)], [text()]),
            Example([image()], [text()]),
            "photo_2x2 comes with annotated",
        ),
        (
            Example([image(objects=OBJECTS)], [text()]),
            Example([image(objects=WITH_ATTRIBUTES)], [text()]),
            "cannot mix objects with attributes",
        ),
        (Example([image()], [text()]), Example([image()], [text(targets={})]), "texts with targets"),
        (
            Example([image()], [text()]),
            Example([image()], [text(targets={"box": np.zeros(3, np.float32)})]),
            "target 'box' has different shapes",
        ),
        (Example([image()], [text()]), Example([image()], [text(looks_at=(1,))]), "looks at image 1 of an example"),
        (Example([image()], [text()]), Example([image()], [text(positions={"mask": 1})]), "names the positions"),
        (Example([], [text(looks_at=())]), Example([], []), "0 images and 1 texts"),
    ],
)
def test_examples_that_do_not_go_together(first, second, message):
    with pytest.raises(ValueError, match=message):
        join(first, second)


def test_a_dataset_in_groups_gives_the_rows_of_single_texts(tiny):
    dataset = RefCOCODataset(
        tiny.images_root,
        tiny.instances_file,
        tiny.refs_file,
        "train",
        tiny.tokenizer,
        ResizeRule(60, 1000),
        with_objects=True,
    )
    grouped = join(dataset[Request(0, (0, 1, 2))], dataset[Request(1, (5, 6))])
    single = join(*(dataset[Request(int(text > 4), (text,))] for text in (0, 1, 2, 5, 6)))
    assert grouped.looks_at.flatten().tolist() == [0, 0, 0, 1, 1]
    assert single.looks_at.flatten().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(grouped.texts.input_ids, single.texts.input_ids)
    assert torch.equal(grouped.targets["box"], single.targets["box"])
    assert grouped.records == single.records
    for row, image_row in enumerate(grouped.looks_at.flatten()):
        assert torch.equal(grouped.images.pixels[image_row], single.images.pixels[row])
        assert torch.equal(grouped.boxes[image_row], single.boxes[row])
        assert torch.equal(
            grouped.detection_targets.attributes[image_row], single.detection_targets.attributes[row][:, :2]
        )


def test_labels_are_padded_and_targets_of_regions_stay_with_their_image():
    def example(boxes: int, *lengths: int) -> Example:
        shown = image(boxes=boxes)
        shown.region_targets = {"object_class": np.arange(boxes)}
        shown.roi_masks = np.ones((boxes, 7, 7), dtype=np.float32)
        texts = [text(length, targets={"mlm_labels": np.full(length, length)}) for length in lengths]
        return Example([shown], texts)

    batch = join(example(2, 3, 1), example(0, 2))
    assert batch.targets["mlm_labels"].tolist() == [[3, 3, 3], [1, -1, -1], [2, 2, -1]]
    assert [rows.tolist() for rows in batch.region_targets["object_class"]] == [[0, 1], []]
    assert [tuple(masks.shape) for masks in batch.roi_masks] == [(2, 7, 7), (0, 7, 7)]

    other = example(2, 3)
    other.images[0].region_targets = {}
    with pytest.raises(ValueError, match="targets \\['object_class'\\] of its regions"):
        join(example(2, 3), other)
