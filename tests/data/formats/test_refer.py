from __future__ import annotations

import json
import os
import pickle
import re

import pytest

from e2e_vl.data.refcoco import ReferFiles, read_refs, split_contains


def read(tiny) -> ReferFiles:
    return ReferFiles(tiny.refs_file, tiny.instances_file)


def test_joins_expressions_with_images_and_annotations(tiny):
    files = read(tiny)
    assert [len(files.in_split(split)) for split in ("testA", "testB", "train")] == [1, 1, 7]
    train = files.in_split("train")
    assert [expression.sent_id for expression in train] == [10, 11, 20, 21, 22, 30, 31]
    assert train[0].sentence == "red square on the left"
    assert [expression.family for expression in train] == ["relation"] + [None] * 6
    assert files.instances.images[train[0].image_id].file_name == "seven.png"
    assert files.instances.annotations[train[2].ann_id].box == (60, 10, 90, 40)


def test_family_may_stand_at_the_ref(tiny):
    tiny.refs[2]["family"] = "attribute"
    assert [expression.family for expression in read(tiny.write()).in_split("train")[5:]] == ["attribute"] * 2


def test_json_has_the_same_content(tiny):
    path = tiny.refs_file.with_suffix(".json")
    path.write_text(json.dumps(tiny.refs))
    assert ReferFiles(path, tiny.instances_file).expressions == read(tiny).expressions


@pytest.mark.parametrize(
    ("asked", "name", "inside"),
    [
        ("testA", "testA", True),
        ("testA", "testAB", True),
        ("testA", "testB", False),
        ("testB", "testAB", True),
        ("testAB", "testA", False),
        ("testAB", "testAB", True),
        ("test", "testA", True),
        ("test", "test", True),
        ("test", "train", False),
        ("train", "train", True),
        ("val", "minival", False),
    ],
)
def test_split_names_follow_the_refer_api(asked, name, inside):
    assert split_contains(asked, name) is inside


def test_test_means_all_test_splits(tiny):
    assert [expression.ref_id for expression in read(tiny).in_split("test")] == [4, 5]


def test_an_unknown_split_lists_the_splits(tiny):
    with pytest.raises(ValueError, match=r"refs\(unc\)\.p: no split 'val'; the file has testA, testB, train"):
        read(tiny).in_split("val")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda refs: refs[1].update(ann_id=999), r"ref 2 refers to annotation 999, which is not in .*instances\.json"),
        (lambda refs: refs[1].update(image_id=999), r"ref 2 is about image 999, which is not in .*instances\.json"),
        (lambda refs: refs[1].update(image_id=3), "ref 2 is about image 3, but its annotation 101 belongs to image 7"),
        (lambda refs: refs[1].update(ref_id=1), "ref 1 is listed twice"),
        (lambda refs: refs[1].update(sentences=[]), "ref 2 has no sentences"),
        (lambda refs: refs[1]["sentences"][0].update(sent_id=10), "ref 2: sentence 10 occurs twice"),
        (lambda refs: refs[1]["sentences"][0].pop("sent"), "ref 2: a sentence has no 'sent'"),
        (lambda refs: refs[1].pop("split"), "ref 2 has no 'split'"),
        (lambda refs: refs[1].pop("ref_id"), "ref number 1 has no 'ref_id'"),
    ],
)
def test_a_bad_ref_is_named(tiny, change, message):
    change(tiny.refs)
    with pytest.raises(ValueError, match=rf"refs\(unc\)\.p: {message}"):
        read(tiny.write())


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_tries_to_run_code_is_refused_before_it_runs(tiny, tmp_path, protocol):
    tiny.refs_file.write_bytes(pickle.dumps([Exploit(tmp_path / "harm")], protocol=protocol))
    with pytest.raises(ValueError, match=r"refs\(unc\)\.p: tries to run code \((posix|nt|os)\.mkdir\)"):
        read_refs(tiny.refs_file)
    assert not (tmp_path / "harm").exists()
    pickle.loads(tiny.refs_file.read_bytes())  # the file is dangerous indeed
    assert (tmp_path / "harm").exists()


def test_python_2_byte_strings_in_utf_8_and_latin_1(tmp_path):
    def python_2_pickle(text: bytes) -> bytes:
        return b"\x80\x02]q\x01U" + bytes([len(text)]) + text + b"a."

    for encoding in ("utf-8", "latin-1"):
        path = tmp_path / f"{encoding}.p"
        path.write_bytes(python_2_pickle("café".encode(encoding)))
        assert read_refs(path) == ["café"]


@pytest.mark.parametrize("content", [b"", b"\x80\x02]q", b"not a pickle at all", b"\x80\x02h\x07."])
def test_a_broken_pickle_gives_one_sentence(tmp_path, content):
    path = tmp_path / "refs(x).p"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: not a readable pickle")):
        read_refs(path)


def test_a_file_without_a_list_or_no_file(tmp_path):
    (tmp_path / "refs.json").write_text("{}")
    with pytest.raises(ValueError, match=r"refs\.json: holds a dict, expected a list"):
        read_refs(tmp_path / "refs.json")
    with pytest.raises(FileNotFoundError, match=r"gone\.p: cannot read the refs"):
        read_refs(tmp_path / "gone.p")


def test_empty_boxes_are_left_out_unless_they_are_referred_to(tiny, caplog):
    """COCO's own file, which RefCOCO's is made from, has some."""
    boxes = {row["id"]: row for row in tiny.instances["annotations"]}
    referred = {ref["ann_id"] for ref in tiny.refs}
    other = next(number for number in boxes if number not in referred)
    boxes[other]["bbox"] = [10, 20, 0, 5]
    files = read(tiny.write())
    assert other not in files.instances.annotations and len(files.expressions) == len(read(tiny).expressions)
    assert f"left out 1 annotations with empty boxes: [{other}]" in caplog.text
    boxes[tiny.refs[0]["ann_id"]]["bbox"] = [10, 20, 0, 5]
    with pytest.raises(ValueError, match=rf"annotation {tiny.refs[0]['ann_id']}.* is empty or inverted.*refers to it"):
        read(tiny.write())
