"""Broken and missing files of VCR are named in one sentence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from e2e_vl.data.config import CLASS_NAMES
from e2e_vl.data.storage.record_errors import NotedErrors
from e2e_vl.data.vcr import VCRFile, read_detected_objects, read_metadata
from tests.data.tiny_vcr import BOXES, TinyVCR


@pytest.fixture
def tiny(tmp_path) -> TinyVCR:
    return TinyVCR(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("objects"), r"line 2 \(val-1\) has no 'objects'"),
        (lambda line: line.update(objects="person"), "objects is 'person', expected a list"),
        (lambda line: line.update(img_fn="../a.png"), "inside the image folder"),
        (lambda line: line.update(question=[]), r"val-1\): question is \[\], expected a list"),
        (lambda line: line["question"].append([4]), "names the object 4, but the line has 4 objects"),
        (lambda line: line["question"].append([]), r"question\[\d\] is \[\], expected a list"),
        (
            lambda line: line["answer_choices"][3].append(7),
            r"answer_choices\[3\]\[\d\] is 7, expected a text or a list",
        ),
        (lambda line: line["answer_choices"].pop(), "answer_choices is .*, expected a list of at least 4 values"),
        (lambda line: line.update(answer_label=4), r"answer_label is 4, expected 0 to 3"),
        (lambda line: line.update(answer_label=True), r"answer_label is True, expected 0 to 3"),
        (lambda line: line.pop("rationale_label"), r"the labels are \[2, None\]"),
        (
            lambda line: [line.pop("rationale_label"), line.pop("answer_label")],
            "has no labels, unlike the lines before",
        ),
        (lambda line: line.update(annot_id="val-0"), "the annot_id val-0 is there twice"),
    ],
)
def test_broken_lines(tiny, change, message):
    change(tiny.lines[1])
    with pytest.raises(ValueError, match=f"val.jsonl.*{message}"):
        VCRFile(tiny.write().file)


def test_a_check_finds_keys_that_are_there_twice(tiny):
    file = tiny.write().file
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, *(line[:-1] + ', "answer_label": 1}' for line in others)]))
    assert len(VCRFile(file)) == len(tiny.lines)  # in a run the last one counts: looking takes a quarter of the time
    noted = NotedErrors()
    VCRFile(file, noted)
    assert len(noted.sentences) == len(others) > 0
    assert all("not clear: the object has the key 'answer_label' twice" in one for one in noted.sentences)


def test_broken_files(tiny):
    tiny.write()
    tiny.file.write_text("{}\n{")
    with pytest.raises(ValueError, match=r"val.jsonl, line 1 has no 'annot_id'"):
        VCRFile(tiny.file)
    tiny.file.write_text("\n")
    with pytest.raises(ValueError, match="no question in the file"):
        VCRFile(tiny.file)
    tiny.file.write_text("nothing\n")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        VCRFile(tiny.file)
    with pytest.raises(FileNotFoundError, match="cannot read the VCR questions"):
        VCRFile(tiny.root / "none.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["person"]}, r"names \['person'\] differ from the question's objects"),
        ({"boxes": BOXES[:2]}, "boxes must hold one entry for each of the 4 objects"),
        ({"boxes": [[1, 2, 3], *BOXES[1:]]}, r"boxes\[0\] is \[1, 2, 3\], expected a list of"),
        ({"boxes": [[5, 5, 5, 9, 1], *BOXES[1:]]}, "box 0 .* is empty or inverted"),
        ({"segms": [[[1, 2]], [], [], []]}, "segms 0 must be a list of outlines"),
        ({"segms": [[[["x", 2]]], [], [], []]}, "segms 0 must be a list of outlines"),
        ({"attribute_ids": [[1], [2]]}, "attribute_ids must be a list of equally many numbers"),
        ({"attribute_ids": [[1], [2], [3], [-1]]}, "numbers from 0 for each of the 4 objects"),
        ({"width": 100.5}, "width is 100.5, expected a whole number"),
    ],
)
def test_broken_metadata(tiny, change, message):
    tiny.metadata |= change
    with pytest.raises(ValueError, match=message):
        read_metadata(tiny.write().images_root / "film" / "a.json", VCRFile(tiny.file)[0])


def test_missing_metadata_names_the_question(tiny):
    question = VCRFile(tiny.write().file)[1]
    (tiny.images_root / "film" / "b.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"b.json: cannot read the metadata of val-1"):
        read_metadata(tiny.images_root / question.metadata_fn, question)


def test_an_object_may_have_no_outline(tiny):
    tiny.metadata["segms"][1] = []
    question = VCRFile(tiny.write().file)[0]
    assert read_metadata(tiny.images_root / "film" / "a.json", question)[1].outlines[1] == []


def test_numbers_in_quotes_are_points_too(tiny):
    """Files that were read before are read all the same, one outline at a time."""
    question = VCRFile(tiny.write().file)[0]
    plain = read_metadata(tiny.images_root / "film" / "a.json", question)[1]
    tiny.metadata["segms"][2] = [[[str(x), y] for x, y in tiny.metadata["segms"][2][0]], [[1, 2], [3, 4.5]]]
    quoted = read_metadata(tiny.write().images_root / "film" / "a.json", question)[1]
    assert [len(outlines) for outlines in quoted.outlines] == [1, 1, 2, 1]
    assert quoted.outlines[2][0].tolist() == plain.outlines[2][0].tolist()
    assert quoted.outlines[2][1].tolist() == [[1, 2], [3, 4.5]] and quoted.outlines[3][0].dtype == np.float64
    assert quoted.boxes.tolist() == [[float(value) for value in box[:4]] for box in BOXES]


def test_a_question_is_kept_as_it_is(tiny):
    tiny.lines[1] |= {"family": "why", "question": ["\U0001f600", "\u4e2d", [0]], "number": 2**70}
    question = VCRFile(tiny.write().file)[1]
    wanted = {key: value for key, value in tiny.lines[1].items() if key not in ("movie", "number")}
    assert dataclasses.asdict(question) == wanted


def test_only_objects_with_a_higher_score_are_kept(tiny):
    tiny.metadata["boxes"] = [[*box[:4], score] for box, score in zip(BOXES, (0.7, 0.71, 1.0, 0.0), strict=True)]
    file = tiny.write().images_root / "film" / "a.json"
    size, objects = read_detected_objects(file, "a", 0.7)
    assert size == (tiny.metadata["height"], tiny.metadata["width"])
    assert objects.boxes.tolist() == [[float(value) for value in box[:4]] for box in BOXES[1:3]]
    assert objects.names == tuple(tiny.metadata["names"][1:3])
    assert [CLASS_NAMES[number] for number in objects.classes] == list(objects.names)
    assert [len(outlines) for outlines in objects.outlines] == [len(one) for one in tiny.metadata["segms"][1:3]]
    assert len(read_detected_objects(file, "a", 1.0)[1].boxes) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": [box[:4] for box in BOXES]}, "box 0 has no score from 0 to 1"),
        ({"boxes": [[*box[:4], 1.5] for box in BOXES]}, "box 0 has no score from 0 to 1"),
        ({"names": ["person", "unicorn", "person", "person"]}, "the class 'unicorn' is none of VCR's 80 classes"),
        ({"segms": []}, "segms must hold one entry for each of the 4 objects"),
    ],
)
def test_broken_objects_of_an_image(tiny, change, message):
    tiny.metadata["boxes"] = [[*box[:4], 0.9] for box in BOXES]
    tiny.metadata |= change
    with pytest.raises(ValueError, match=f"a.json \\(objects of image 7\\): {message}"):
        read_detected_objects(tiny.write().images_root / "film" / "a.json", "7", 0.7)
