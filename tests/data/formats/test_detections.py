from __future__ import annotations

import json
import math

import numpy as np
import pytest

from e2e_vl.data.image_loader import DetectionsFile


def test_a_flat_list_is_grouped_by_image_in_file_order(tiny):
    found = DetectionsFile(tiny.detections_file).by_image
    assert set(found) == {3, 7, 9}
    np.testing.assert_array_equal(found[7].boxes, [[61, 11, 89, 39], [11, 21, 29, 39]])
    np.testing.assert_allclose(found[7].scores, [0.4, 0.8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": [1, 1, 0, 5]}, r"detection 1: .*empty or inverted"),
        ({"box": [1, 1, -3, 5]}, r"detection 1: .*empty or inverted"),
        ({"box": [1, math.inf, 3, 5]}, r"detection 1: .*finite"),
        ({"box": {"x": 1, "y": 1, "w": 3, "h": 5}}, r"detection 1: .*finite"),
        ({"score": math.nan}, r"detection 1: score is nan, expected a finite number"),
    ],
)
def test_a_bad_detection_is_named(tiny, change, message):
    tiny.detections[1].update(change)
    tiny.detections_file.write_text(json.dumps(tiny.detections))
    with pytest.raises(ValueError, match=rf"dets\.json: {message}"):
        DetectionsFile(tiny.detections_file)


def test_a_missing_key_is_named(tiny):
    del tiny.detections[1]["score"]
    with pytest.raises(ValueError, match=r"dets\.json: detection 1 has no 'score'"):
        DetectionsFile(tiny.write().detections_file)


def test_the_older_layout_and_other_content_are_refused(tiny):
    tiny.detections_file.write_text(json.dumps({"dets": tiny.detections}))
    with pytest.raises(ValueError, match="older layout with a key 'dets'"):
        DetectionsFile(tiny.detections_file)
    tiny.detections_file.write_text('"text"')
    with pytest.raises(ValueError, match="holds a str, expected a flat list"):
        DetectionsFile(tiny.detections_file)
