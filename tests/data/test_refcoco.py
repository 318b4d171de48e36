"""What the reader of RefCOCO states; its pixels and wordpieces are tested once for all readers and in the task."""

from __future__ import annotations

import numpy as np
import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.refcoco import RefCOCODataset, ReferFiles
from e2e_vl.samples import ReferredBox
from tests.data.roads import examples, open_dataset


def make(tiny, split="train") -> RefCOCODataset:
    return RefCOCODataset(tiny.images_root, ReferFiles(tiny.refs_file, tiny.instances_file), split)


def test_texts_are_grouped_by_image(tiny):
    dataset = make(tiny)
    assert len(dataset) == 7
    assert dataset.groups == [[0, 1, 2, 3, 4], [5, 6]]
    assert list(dataset.image_ids()) == ["7", "3"]
    assert make(tiny, "test").groups == [[0, 1]]


def test_facts_and_truth_in_pixels_of_the_stored_image(tiny):
    sample = make(tiny).sample((0, 4))
    [image] = sample.images
    assert (image.id, image.size) == ("7", (60, 100))
    assert image.locate() == tiny.images_root / "seven.png"
    assert image.objects.ids == (100, 101, 102) and image.objects.is_crowd.tolist() == [False, False, True]
    np.testing.assert_array_equal(image.objects.attributes, [[1, -1], [0, 2], [-1, -1]])
    first, second = sample.texts
    assert first.words == "red square on the left"
    assert first.metadata == {
        "ref_id": 1,
        "sent_id": 10,
        "image_id": 7,
        "ann_id": 100,
        "sent": "red square on the left",
        "category": "square",
        "gt_box": [10, 20, 30, 40],
        "family": "relation",
    }
    assert first.truth == ReferredBox((10, 20, 30, 40)) and second.truth == ReferredBox((60, 10, 90, 40))
    assert "family" not in second.metadata


def test_boxes_outside_the_image_are_stated_as_they_are(tiny):
    tiny.instances["annotations"][0]["bbox"] = [-4, 20, 24, 45]
    [text] = make(tiny.write()).sample((0,)).texts
    assert text.truth == ReferredBox((-4, 20, 20, 65))


def test_classes_are_those_of_the_instances_file(tiny):
    assert make(tiny).class_names == ["square", "box"]


def test_from_settings(tiny):
    files = {"images": "images", "instances": "instances.json", "refs": "refs(unc).p"}
    settings = DataSettings(name="refcoco", root=str(tiny.images_root.parent), files=files)
    dataset = open_dataset(RefCOCODataset, settings, "train", "gt", training=True)
    assert len(dataset) == 7 and dataset.parts == [{"split": "train"}]
    assert len(examples(dataset, tiny.tokenizer)) == 7
    texts = list(RefCOCODataset.texts_of(*open_options(RefCOCODataset, settings), "train"))
    assert texts == [expression.sentence for expression in dataset.expressions]
    with pytest.raises(ValueError, match=r"have no answers that a list could be built from; set task.config.answers"):
        RefCOCODataset.answers_of(*open_options(RefCOCODataset, settings), "train")
    with pytest.raises(ValueError, match=r"no split 'val'; the file has testA, testB, train"):
        open_dataset(RefCOCODataset, settings, "val")
    with pytest.raises(ValueError, match=r"data\.config has the unknown key 'colour'"):
        open_options(RefCOCODataset, DataSettings(name="refcoco", root=".", config={"colour": 1}))
