"""COCO's captions; the other sources have tests of their own."""

from __future__ import annotations

import json

import pytest

from e2e_vl.data.captions import CocoCaptions

CONTENT = {
    "images": [{"id": 5, "file_name": "a.jpg", "height": 3, "width": 4}, {"id": 1, "file_name": "b.jpg"}],
    "annotations": [
        {"image_id": 1, "id": 7, "caption": "one"},
        {"image_id": 5, "id": 8, "caption": "two"},
        {"image_id": 1, "id": 9, "caption": "three"},
    ],
}


def test_captions_are_numbered_image_by_image(tmp_path):
    (tmp_path / "captions.json").write_text(json.dumps(CONTENT))
    source = CocoCaptions(tmp_path / "captions.json", tmp_path / "images")
    assert [list(texts) for texts in source.groups] == [[0], [1, 2]]
    assert [source.caption(text) for text in range(3)] == ["two", "one", "three"]
    assert [source.name(group) for group in range(2)] == ["5", "1"]
    assert source.image(1) == tmp_path / "images" / "b.jpg"
    assert [source.image_size(group) for group in range(2)] == [(3, 4), None]
    assert source.boxes(0) is None


def test_coco_files_with_errors(tmp_path):
    content = {
        "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}],
        "annotations": [{"image_id": 1, "id": 5, "caption": "a"}],
    }

    def read(**changes) -> CocoCaptions:
        (tmp_path / "captions.json").write_text(json.dumps({**content, **changes}))
        return CocoCaptions(tmp_path / "captions.json", tmp_path)

    assert read().image_ids == [1]
    assert read().image_size(0) is None
    for changes, message in (
        ({"images": [{"id": 1}]}, "image 1 has no 'file_name'"),
        ({"images": content["images"][:1] * 2}, "image 1 is listed twice"),
        ({"annotations": [{"image_id": 3, "caption": "a"}]}, "caption number 0 is about image 3, which is not among"),
        ({"annotations": [{"image_id": 1, "caption": " "}]}, r"caption number 0 \(of image 1\) is empty"),
        ({"annotations": [{"image_id": 1}]}, "caption number 0 has no 'caption'"),
        ({"annotations": []}, "there are no captions"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            read(**changes)
        assert "captions.json" in str(caught.value)
