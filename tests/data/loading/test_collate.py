from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from e2e_vl.data.batching import Request, collate, pad_texts
from e2e_vl.examples import (
    DetectionObjects,
    Example,
    ImageExample,
    ImageTransform,
    Targets,
    TextExample,
    per_wordpiece,
    stacked,
)
from e2e_vl.structures import RegionLabels
from e2e_vl.tasks.refcoco import ReferringPreprocessor
from e2e_vl.text import TextEncoding, TextTokenizer
from tests.data.roads import examples
from tests.data.tiny_readers import refcoco

MEAN, STD = (10.0, 20.0, 30.0), (1.0, 2.0, 4.0)


@dataclasses.dataclass
class BoxTargets(Targets):
    box: torch.Tensor | None = stacked()
    labels: torch.Tensor | None = per_wordpiece()


def image(height=4, width=6, boxes=2, value=50, **fields) -> ImageExample:
    return ImageExample(
        pixels=np.full((height, width, 3), value, dtype=np.uint8),
        image_transform=ImageTransform((2 * height, 2 * width), (height, width)),
        name=f"photo_{height}x{width}",
        boxes=None if boxes is None else np.arange(4 * boxes, dtype=np.float32).reshape(boxes, 4),
        **fields,
    )


def encoding(ids, segments=None, summary=None) -> TextEncoding:
    ids = np.array(ids, dtype=np.int64)
    segments = np.zeros_like(ids) if segments is None else np.array(segments, dtype=np.int64)
    return TextEncoding(ids, segments, np.arange(len(ids)), summary)


def text(length=3, image_index=(0,), **changes) -> TextExample:
    fields = {
        "encoding": encoding(range(5, 5 + length)),
        "image_index": image_index,
        "targets": BoxTargets(np.full(4, length, dtype=np.float32)),
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
    assert batch.image_index.tolist() == [[0, -1], [0, -1], [1, 2], [2, -1], [-1, -1]]
    assert batch.texts.attention_mask.sum(1).tolist() == [3, 2, 4, 1, 1]
    assert batch.targets.box[:, 0].tolist() == [3, 2, 4, 1, 1]
    assert batch.targets.box.dtype == torch.float32
    assert [record["length"] for record in batch.records] == [3, 2, 4, 1, 1]
    assert [len(boxes) for boxes in batch.boxes] == [2, 2, 2]
    assert batch.detection_targets is None
    assert batch.targets.labels is None
    assert batch.pixel_masks is batch.boxes_to_mask is batch.masked_regions is batch.seeds is batch.roi_masks is None
    assert batch.region_labels == RegionLabels()
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
    one = DetectionObjects(np.ones((1, 4), np.float32), np.array([3]), np.array([[5, 6]]))
    none = DetectionObjects(np.ones((0, 4), np.float32), np.array([], dtype=np.int64), np.zeros((0, 1), np.int64))
    two = DetectionObjects(np.ones((2, 4), np.float32), np.array([0, 1]), np.array([[7], [-1]]))
    targets = join(*(Example([image(objects=o)], [text()]) for o in (one, none, two))).detection_targets
    assert [boxes.shape for boxes in targets.boxes] == [(1, 4), (0, 4), (2, 4)]
    assert [classes.tolist() for classes in targets.classes] == [[3], [], [0, 1]]
    assert [attributes.tolist() for attributes in targets.attributes] == [[[5, 6]], [], [[7, -1], [-1, -1]]]
    assert targets.attributes[1].shape == (0, 2)
    plain = DetectionObjects(np.ones((1, 4), np.float32), np.array([3]))
    assert join(Example([image(objects=plain)], [text()])).detection_targets.attributes is None


def test_what_is_known_about_boxes_stays_with_their_image():
    def example(boxes: int) -> Example:
        classes, probabilities = np.arange(boxes), np.full((boxes, 3), boxes, dtype=np.float32)
        masks, hide = np.ones((boxes, 7, 7), dtype=np.float32), np.ones((boxes, 4), dtype=np.float32)
        shown = image(boxes=boxes, box_classes=classes, class_probs=probabilities, roi_masks=masks, boxes_to_mask=hide)
        return Example([shown], [text(seed=boxes + 5)])

    batch = join(example(2), example(0))
    assert [rows.tolist() for rows in batch.region_labels.classes] == [[0, 1], []]
    assert [rows.tolist() for rows in batch.region_labels.class_probs] == [[[2, 2, 2], [2, 2, 2]], []]
    assert [tuple(masks.shape) for masks in batch.roi_masks] == [(2, 7, 7), (0, 7, 7)]
    assert [tuple(boxes.shape) for boxes in batch.boxes_to_mask] == [(2, 4), (0, 4)]
    assert batch.seeds.tolist() == [7, 5]
    other = example(2)
    for field, what in (("box_classes", "classes of the"), ("class_probs", "class dist"), ("roi_masks", "instance")):
        lacks = Example([dataclasses.replace(other.images[0], **{field: None})], other.texts)
        with pytest.raises(ValueError, match=f"photo_4x6 comes with {what}.*photo_4x6 without"):
            join(example(2), lacks)


def test_seeds_are_known_for_all_texts_or_for_none():
    assert join(Example([image()], [text(seed=1), text()])).seeds is None


OBJECTS = DetectionObjects(np.ones((1, 4), np.float32), np.array([3]))
WITH_ATTRIBUTES = DetectionObjects(np.ones((1, 4), np.float32), np.array([3]), np.array([[1]]))


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
        (
            Example([image()], [text()]),
            Example([image()], [text(targets=Targets())]),
            "texts with targets BoxTargets and Targets cannot",
        ),
        (
            Example([image()], [text()]),
            Example([image()], [text(targets=None)]),
            "texts with targets BoxTargets and NoneType",
        ),
    ],
)
def test_examples_that_do_not_go_together(first, second, message):
    with pytest.raises(ValueError, match=message):
        join(first, second)


def test_a_dataset_in_groups_gives_the_rows_of_single_texts(tiny):
    dataset = examples(refcoco(tiny), ReferringPreprocessor(TextTokenizer(tiny.tokenizer)), with_objects=True)
    grouped = join(dataset[Request(0, (0, 1, 2))], dataset[Request(1, (5, 6))])
    single = join(*(dataset[Request(int(text > 4), (text,))] for text in (0, 1, 2, 5, 6)))
    assert grouped.image_index.flatten().tolist() == [0, 0, 0, 1, 1]
    assert single.image_index.flatten().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(grouped.texts.input_ids, single.texts.input_ids)
    assert torch.equal(grouped.targets.box, single.targets.box)
    assert grouped.records == single.records
    for row, image_row in enumerate(grouped.image_index.flatten()):
        assert torch.equal(grouped.images.pixels[image_row], single.images.pixels[row])
        assert torch.equal(grouped.boxes[image_row], single.boxes[row])
        assert torch.equal(
            grouped.detection_targets.attributes[image_row], single.detection_targets.attributes[row][:, :2]
        )


def test_labels_are_padded_like_the_wordpieces():
    texts = [text(length, targets=BoxTargets(labels=np.full(length, length))) for length in (3, 1, 2)]
    batch = join(Example([image()], texts))
    assert batch.targets.box is None
    assert batch.targets.labels.tolist() == [[3, 3, 3], [1, -1, -1], [2, 2, -1]]


def test_texts_are_padded_at_the_end():
    one, other = text(encoding=encoding([2, 9, 3], [0, 1, 1])), text(encoding=encoding([2, 3]))
    batch = pad_texts([one, other], pad_id=7)
    assert batch.input_ids.tolist() == [[2, 9, 3], [2, 3, 7]]
    assert batch.token_type_ids.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.attention_mask.tolist() == [[True] * 3, [True, True, False]]
    assert batch.summary is None
    assert batch.region_of_token is None
    assert len(batch) == 2
    empty = pad_texts([text(encoding=encoding([]))])
    assert empty.input_ids.shape == (1, 1) and not empty.attention_mask.any()
    assert join(Example([image()], [one, other]), pad_id=7).texts.input_ids[1, 2] == 7


def test_places_of_answers_and_regions_of_tokens():
    one = text(encoding=encoding([2, 9, 3], summary=1))
    other = text(encoding=encoding([4, 3], summary=0), region_of_token=np.array([1, -1]))
    batch = pad_texts([one, other])
    assert batch.summary.tolist() == [1, 0] and batch.summary.dtype == torch.int64
    assert batch.region_of_token.tolist() == [[-1, -1, -1], [1, -1, -1]]
