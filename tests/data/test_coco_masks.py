"""Masks of instances files: those of COCO's photos, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from detector.errors import UserError
from e2e_vl.data import table_files
from e2e_vl.data.coco_masks import CocoMasks
from e2e_vl.drawing import RED, tint
from e2e_vl.masks import RunLengths, encode_masks

# polygons with one part and with several, and crowds, of COCO 2017 (annotations: CC BY 4.0, COCO Consortium)
COCO = Path(__file__).parents[1] / "golden" / "masks" / "coco_instances.json"


def test_polygons_and_crowds_of_coco_are_read_and_drawn():
    content = json.loads(COCO.read_text("utf-8"))
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    masks = CocoMasks(COCO)
    kinds = set()
    for annotation in content["annotations"]:
        [mask] = masks.of([annotation["id"]])
        kinds.add((isinstance(mask, RunLengths), len(mask) if isinstance(mask, list) else 1))
        size = sizes[annotation["image_id"]]
        pixels = encode_masks([mask], size).to_mask()
        if annotation["iscrowd"]:  # its area in COCO's files is not that of its runs
            assert pixels.sum() == sum(annotation["segmentation"]["counts"][1::2])
        else:
            assert pixels.sum() == pytest.approx(annotation["area"], rel=0.12, abs=12)
        x, y, width, height = annotation["bbox"]
        rows, columns = np.nonzero(pixels)
        assert x - 1.5 <= columns.min() and columns.max() + 1 <= x + width + 1.5
        assert y - 1.5 <= rows.min() and rows.max() + 1 <= y + height + 1.5
        drawn = tint(np.full((*size, 3), 200, np.uint8), pixels, RED)
        assert np.array_equal((drawn != 200).any(axis=2), pixels)
    assert {(True, 1), (False, 1), (False, 2)} <= kinds


def write(path: Path, **changes) -> Path:
    annotation = {"id": 5, "image_id": 1, "segmentation": [[0, 0, 4, 0, 4, 4]]} | changes
    content = {"images": [{"id": 1, "width": 8, "height": 6}], "annotations": [annotation]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_later_start_reads_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "MIN_SOURCE_BYTES", 1)
    path = write(tmp_path / "instances.json")
    first = CocoMasks(path, tmp_path / "tables").of([5])
    monkeypatch.setattr(CocoMasks, "_read", None)  # must not be called
    assert CocoMasks(path, tmp_path / "tables").of(["5"]) == first == [[[0, 0, 4, 0, 4, 4]]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segmentation": [[0, 0, 4, 4]]}, r"length >= 6 .*annotations\[0\].segmentation"),
        ({"segmentation": [[0, 0, 4, 0, 4, 4, 1]]}, "annotation 5: a polygon of its mask has 7 numbers"),
        ({"segmentation": {"size": [8, 6], "counts": [48]}}, "annotation 5: its mask is of an image of 6 x 8 pixels"),
        ({"segmentation": {"size": [6, 8], "counts": [10, 5]}}, "annotation 5: the run lengths .* add up to 15"),
        ({"segmentation": {"size": [6, 8], "counts": "no RLE"}}, r"matching regex .*annotations\[0\].segmentation"),
        ({"image_id": 2}, "annotation 5 has the image_id 2"),
    ],
)
def test_a_wrong_mask_is_one_sentence(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        CocoMasks(write(tmp_path / "instances.json", **changes))


def test_a_missing_mask_is_named_when_it_is_needed(tmp_path):
    masks = CocoMasks(write(tmp_path / "instances.json", segmentation=[]))
    masks.require([])
    with pytest.raises(UserError, match=r"annotation 5 has no mask \(segmentation\)"):
        masks.require([5])
