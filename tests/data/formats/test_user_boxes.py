"""Boxes that users write on a command line or in a small file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e_vl.data.user_inputs import read_boxes


def test_boxes_in_words():
    given = read_boxes(["1,2,3,4", "0.5,0,9,8.25"])
    np.testing.assert_array_equal(given.boxes, [[1, 2, 3, 4], [0.5, 0, 9, 8.25]])
    assert given.names is None and given.outlines is None
    assert read_boxes(["person:1,2,3,4", "hot:dog:1,2,3,4"]).names == ("person", "hot:dog")


def test_a_metadata_file(tmp_path):
    outline = [[[1, 2], [3, 2], [3, 4]]]
    content = {"boxes": [[1, 2, 3, 4, 0.75]], "names": ["cat"], "segms": [outline], "width": 9, "height": 9}
    (tmp_path / "one.json").write_text(json.dumps(content))
    given = read_boxes([str(tmp_path / "one.json")])
    np.testing.assert_array_equal(given.boxes, [[1, 2, 3, 4]])
    assert given.names == ("cat",) and given.origin.endswith("one.json")
    np.testing.assert_array_equal(given.outlines[0], outline)
    (tmp_path / "none.json").write_text("[]")
    assert read_boxes([str(tmp_path / "none.json")]).boxes.shape == (0, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1, 2, 3]]", "box 0 is no box"),
        ("[[1, 2, 3, true]]", "box 0 is no box"),
        ("[[1, 2, 3, 4], [5, 6, 5, 9]]", "box 1 is no box"),
        ("[[1, 2, 3, NaN]]", "box 0 is no box"),
        ("3", "expected a list"),
        ("[", "not valid JSON"),
        ('{"boxes": [[1, 2, 3, 4]], "names": ["a", "b"]}', "one class name for each of the 1"),
        ('{"boxes": [[1, 2, 3, 4]], "segms": []}', "outlines of each of the 1"),
        ('{"boxes": [[1, 2, 3, 4]], "segms": [[[1, 2]]]}', "segms 0 must be a list of outlines"),
    ],
)
def test_files_that_hold_no_boxes(tmp_path, content, message):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=f"bad.json.*{message}"):
        read_boxes([str(tmp_path / "bad.json")])


def test_arrays_that_would_run_code(tmp_path):
    np.savez(tmp_path / "bad.npz", boxes=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="no array 'boxes' that can be read"):
        read_boxes([str(tmp_path / "bad.npz")])
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match="no array 'boxes' that can be read"):
        read_boxes([str(tmp_path / "text.npz")])


def test_words_that_are_no_boxes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--hide: .*none\.json is no file"):
        read_boxes([str(tmp_path / "none.json")], "--hide")
    with pytest.raises(ValueError, match=r"box 1 \('1,2,x,4'\) is no box"):
        read_boxes(["1,2,3,4", "1,2,x,4"])
    with pytest.raises(ValueError, match="Some boxes have a class and others have none"):
        read_boxes(["cat:1,2,3,4", "1,2,3,4"])
