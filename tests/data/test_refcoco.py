"""RefCOCO: expressions, the rules of splits, and refs files that are damaged or dangerous."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest

from e2e_vl.data.base import open_options
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.refcoco import Expression, RefCOCODataset, read_expressions, read_refs, split_contains
from e2e_vl.samples import ReferredBox
from tests.data.helpers import examples, open_dataset, refused


def make(tiny, split="train", **named) -> RefCOCODataset:
    return open_dataset(RefCOCODataset, tiny.settings, split, "gt", **named)


def read(tiny) -> list[Expression]:
    return read_expressions(tiny.refs_file, CocoInstances(tiny.instances_file))


def test_texts_are_grouped_by_image(tiny):
    dataset = make(tiny, training=True)
    assert len(dataset) == 7 and list(dataset.groups) == [[0, 1, 2, 3, 4], [5, 6]]
    assert list(dataset.image_ids()) == ["7", "3"] and dataset.parts == [{"split": "train"}]
    assert list(make(tiny, "test").groups) == [[0, 1]]
    assert len(examples(dataset, tiny.tokenizer)) == 7
    options = open_options(RefCOCODataset, tiny.settings)
    texts = list(RefCOCODataset.texts_of(*options, "train"))
    assert texts == [expression.words for expression in dataset.texts]
    with refused("task.config.answers"):
        RefCOCODataset.answers_of(*options, "train")
    with refused("refs(unc).p", "'val'", "testA, testB, train"):
        make(tiny, "val")


def test_metadata_and_truth_in_pixels_of_the_stored_image(tiny):
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
        "category": "square",
        "gt_box": [10, 20, 30, 40],
        "family": "relation",
    }
    assert first.truth == ReferredBox((10, 20, 30, 40)) and second.truth == ReferredBox((60, 10, 90, 40))
    assert "family" not in second.metadata
    assert first.phrases.spans == ((0, len(first.words)),) and first.phrases.boxes[0].tolist() == [[10, 20, 30, 40]]


def test_boxes_beyond_the_image_are_not_clipped(tiny):
    tiny.instances["annotations"][0]["bbox"] = [-4, 20, 24, 45]
    [text] = make(tiny.write()).sample((0,)).texts
    assert text.truth == ReferredBox((-4, 20, 20, 65))


def test_family_may_stand_at_the_ref_and_json_has_the_same_content(tiny):
    tiny.refs[2]["family"] = "attribute"
    expressions = read(tiny.write())
    assert [one.sent_id for one in expressions][:7] == [10, 11, 20, 21, 22, 30, 31]
    assert [one.family for one in expressions][:7] == ["relation", *[None] * 4, "attribute", "attribute"]
    path = tiny.refs_file.with_suffix(".json")
    path.write_text(json.dumps(tiny.refs))
    assert read_refs(path) == read_refs(tiny.refs_file)


@pytest.mark.parametrize(
    ("asked", "name", "inside"),
    [
        ("testA", "testA", True),
        ("testA", "testAB", True),
        ("testA", "testB", False),
        ("testAB", "testA", False),
        ("test", "testA", True),
        ("test", "train", False),
        ("val", "minival", False),
    ],
)
def test_split_names_follow_the_refer_api(asked, name, inside):
    assert split_contains(asked, name) is inside


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda refs: refs[1].update(ann_id=999), ["ref 2", "annotation 999", "instances.json"]),
        (lambda refs: refs[1].update(image_id=3), ["ref 2", "image 3", "instances.json"]),
        (lambda refs: refs[1].update(sentences=[]), ["[1].sentences"]),
        (lambda refs: refs[1]["sentences"][0].pop("sent"), ["[1].sentences[0]", "sent"]),
        (lambda refs: refs[1].pop("split"), ["[1]", "split"]),
    ],
)
def test_a_bad_ref_is_named(tiny, change, parts):
    change(tiny.refs)
    with refused("refs(unc).p", *parts):
        read(tiny.write())


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_tries_to_run_code_is_refused_before_it_runs(tiny, tmp_path):
    tiny.refs_file.write_bytes(pickle.dumps([Exploit(tmp_path / "harm")], protocol=2))
    with refused("refs(unc).p", "mkdir"):
        read_refs(tiny.refs_file)
    assert not (tmp_path / "harm").exists()
    pickle.loads(tiny.refs_file.read_bytes())  # the file is dangerous indeed
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_python_2_byte_strings(tiny, encoding):
    """`protocol=0` writes texts by escapes, which Python 2 wrote for byte strings."""
    tiny.refs[0]["sentences"][0]["sent"] = "AT THE CAFE"
    data = pickle.dumps(tiny.refs, protocol=2)
    text = b"X\x0b\x00\x00\x00AT THE CAFE"
    own = "at the café".encode(encoding)
    assert data.count(text) == 1
    tiny.refs_file.write_bytes(data.replace(text, b"U" + bytes([len(own)]) + own))
    assert read_refs(tiny.refs_file)[0].sentences[0].sent == "at the café"


@pytest.mark.parametrize("content", [b"not a pickle at all", b"\x80\x02}."])
def test_a_file_that_is_no_list_of_refs(tiny, content):
    tiny.refs_file.write_bytes(content)
    with refused("refs(unc).p"):
        read_refs(tiny.refs_file)


def test_empty_boxes_are_left_out_unless_they_are_referred_to(tiny, caplog):
    """COCO's own file, which RefCOCO's is made from, has some."""
    boxes = {row["id"]: row for row in tiny.instances["annotations"]}
    boxes[102]["bbox"] = [10, 20, 0, 5]
    assert len(read(tiny.write())) == 9
    assert "left out 1 annotations with empty boxes: [102]" in caplog.text
    boxes[100]["bbox"] = [10, 20, 0, 5]
    with refused("ref 1", "annotation 100", "empty box"):
        read(tiny.write())
