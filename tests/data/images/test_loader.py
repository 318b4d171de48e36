"""What RefCOCODataset shares with other readers; its box sources are tested there."""

from __future__ import annotations

import numpy as np
import pytest

from detector.images import ResizeRule
from e2e_vl.data.coco import read_instances
from e2e_vl.data.examples import Request
from e2e_vl.data.image_source import ImageSource
from e2e_vl.data.refcoco import RefCOCODataset

SAME = ResizeRule(short_edge=60, long_edge=1000)


@pytest.mark.parametrize(("order", "colour"), [("RGB", [123, 116, 103]), ("BGR", [103, 116, 123])])
def test_a_blank_image_keeps_boxes_and_size(tiny, order, colour):
    args = tiny.images_root, tiny.instances_file, tiny.refs_file, "train", tiny.tokenizer, SAME
    plain = RefCOCODataset(*args, channel_order=order)[Request(0, (0,))].images[0]
    blank = RefCOCODataset(*args, channel_order=order, blank_image=True)[Request(0, (0,))].images[0]
    assert blank.pixels.shape == plain.pixels.shape and blank.pixels.dtype == np.uint8
    assert (blank.pixels == np.array(colour)).all()
    np.testing.assert_array_equal(blank.boxes, plain.boxes)


def test_without_instances_images_have_the_size_that_they_have(tiny):
    source = ImageSource(SAME, box_source="online")
    image, placement = source.load(7, tiny.images_root / "seven.png", np.random.default_rng(0))
    assert placement.original_size == (60, 100) and image.boxes is None
    source.check_classes(0)


def test_missing_files_and_images(tiny):
    with pytest.raises(ValueError, match="box source 'gt' come from annotated objects"):
        ImageSource(SAME, box_source="gt")
    with pytest.raises(ValueError, match="targets of the detection losses come from annotated objects"):
        ImageSource(SAME, box_source="online", with_objects=True)
    with pytest.raises(ValueError, match="needs at least one resize rule"):
        ImageSource([], box_source="online")
    source = ImageSource(SAME, box_source="gt", instances=read_instances(tiny.instances_file))
    source.require_images([7, 3], "train")
    with pytest.raises(ValueError, match=r"instances\.json: has no image 8 and 1 more of the split val"):
        source.require_images([7, 8, 11], "val")
