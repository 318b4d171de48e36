"""RefCOCO in parquet files: the three layouts give what REFER's files give, with images from inside the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detector.images import load_image
from e2e_vl.config import DataConfig
from e2e_vl.data.base import open_options
from e2e_vl.data.image_loader import Augmentation
from e2e_vl.data.refcoco_parquet import ParquetRefCOCODataset
from e2e_vl.predictions import Prediction
from e2e_vl.samples import ImageBytes, ReferredBoxes
from e2e_vl.tasks.base import load_predicted_image
from tests.data.helpers import make_loader, open_dataset, refused, with_files
from tests.data.tiny_refcoco import GT_7, TinyRefCOCO

pyarrow = pytest.importorskip(
    "pyarrow", reason='pyarrow is not installed; pip install "e2e-vl[parquet]" lets this test run'
)

NAME = "COCO_train2014_000000000007.jpg"
SENTENCES = [{"sent_id": 5, "sent": "red square"}, {"sent_id": 6, "sent": "left one"}]
REF = {"ref_id": 3, "ann_id": 31, "image_id": 7, "split": "val", "sentences": SENTENCES}
BOX = [10.0, 20.0, 30.0, 40.0]  # x, y, width, height
INFO = {"id": 7, "file_name": NAME, "width": 100, "height": 60}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def photo(tiny: TinyRefCOCO) -> bytes:
    """The first photo of the tiny RefCOCO, of 100 x 60 pixels."""
    return (tiny.images_root / tiny.instances["images"][0]["file_name"]).read_bytes()


@pytest.fixture
def layouts(photo) -> dict[str, list[dict[str, Any]]]:
    """The rows of each layout about the same object."""
    image = {"bytes": photo, "path": None}
    benchmark = {"ref_list": [{"ann_info": {"bbox": BOX, "id": 31}, "ref_info": REF}], "image_info": INFO}
    objects = {"question_id": "31", "answer": ["red square", "left one"], "bbox": BOX, "iscrowd": 0}
    corners = [10.0, 20.0, 40.0, 60.0]
    refs = {**REF, "raw_anns": json.dumps({"bbox": BOX}), "raw_image_info": json.dumps(INFO), "bbox": corners}
    return {
        "images": [{**benchmark, "image": image}],
        "objects": [{**objects, "file_name": "COCO_train2014_000000000007_31.jpg", "image": image}],
        "refs": [refs],
    }


def settings_of(folder: Path, layout: str) -> DataConfig:
    files = {"parquet": f"{layout}/{{split}}-*.parquet", "images": "photos"}
    return DataConfig(name="refcoco_parquet", root=str(folder), files=files)


def opened(folder: Path, layout: str, rows: list[dict[str, Any]], boxes: str = "online") -> ParquetRefCOCODataset:
    write(folder / layout / "val-00000-of-00001.parquet", rows)
    return open_dataset(ParquetRefCOCODataset, settings_of(folder, layout), "val", boxes, phrases=True)


@pytest.mark.parametrize("layout", ["images", "objects", "refs"])
def test_layouts(layouts, photo, tmp_path, layout):
    dataset = opened(tmp_path, layout, layouts[layout])
    assert [dataset[text] for text in range(len(dataset))] == ["red square", "left one"]
    sample = dataset.sample(dataset.groups[0])
    [image] = sample.images
    has_ids = layout != "objects"
    assert (image.id, image.size) == ("7", (60, 100) if has_ids else None)
    truth = ReferredBoxes(((10.0, 20.0, 40.0, 60.0),), (31,) if has_ids else None)
    assert list(dataset.truths()) == [truth, truth]
    ids = [text.metadata["sent_id"] for text in sample.texts]
    assert ids == ([5, 6] if has_ids else ["0.0", "0.1"])
    assert [text.metadata["image_id"] for text in sample.texts] == [7, 7]
    assert sample.texts[0].phrases.spans == ((0, 10),)
    file = image.locate()
    if layout == "refs":
        assert file == tmp_path / "photos" / NAME
    else:
        assert file == ImageBytes(photo, f"{tmp_path / layout / 'val-00000-of-00001.parquet'}: row 0")
    files, options = open_options(ParquetRefCOCODataset, settings_of(tmp_path, layout))
    assert list(ParquetRefCOCODataset.texts_of(files, options, "val")) == ["red square", "left one"]


def test_pixels_and_annotated_objects(layouts, tiny, tmp_path):
    """Pixels are read from inside the file; with boxes gt, an instances file has the objects."""
    with refused("data.files.instances"):
        opened(tmp_path, "images", layouts["images"], "gt")
    settings = with_files(settings_of(tmp_path, "images"), instances=tiny.instances_file.name)
    dataset = open_dataset(ParquetRefCOCODataset, settings, "val", "gt")
    loader = make_loader("gt")
    [image] = dataset.sample([0]).images
    loaded = loader.load(image, Augmentation(False, loader.rules.resize[0]))
    assert np.array_equal(loaded.pixels, load_image(tiny.images_root / "seven.png"))
    assert loaded.name.endswith("val-00000-of-00001.parquet: row 0")
    assert loaded.boxes.tolist() == GT_7
    prediction = Prediction(file_name=loaded.name, image_size=(60, 100))
    assert np.array_equal(load_predicted_image(prediction), loaded.pixels[..., ::-1])


def test_rows_of_one_photo_are_one_group(layouts, tmp_path):
    [row] = layouts["objects"]
    other = row | {"question_id": "32", "answer": ["blue square", " "], "bbox": [1.0, 2.0, 3.0, 4.0]}
    dataset = opened(tmp_path, "objects", [row, other])
    assert list(dataset.groups) == [[0, 1, 2]]
    assert dataset.sample([2]).texts[0].truth.boxes == ((1.0, 2.0, 4.0, 6.0),)


def test_a_list_that_joins_two_partitions_is_named(layouts, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("e2e_vl.data.refcoco_parquet.JOINED_ROWS", {1: "the objects of two partitions"})
    opened(tmp_path, "objects", layouts["objects"])
    assert "the objects of two partitions" in caplog.text


@pytest.mark.parametrize(
    ("layout", "change", "parts"),
    [
        ("objects", {"bbox": [10.0, 20.0, 0.0, 40.0]}, ["row 0", "empty or inverted"]),
        ("objects", {"bbox": [0.1, 0.2, 0.3, 0.4]}, ["normalised"]),
        ("objects", {"bbox": [1.0, 2.0]}, ["row 0", "bbox"]),
        ("objects", {"answer": [" "]}, ["none found"]),
        ("refs", {"raw_anns": "{}"}, ["row 0: raw_anns", "bbox"]),
        ("refs", {"raw_anns": "{"}, ["row 0: raw_anns", "not valid JSON"]),
    ],
)
def test_what_cannot_be_read_is_named(layouts, tmp_path, layout, change, parts):
    [row] = layouts[layout]
    with refused("val-", *parts):
        opened(tmp_path, layout, [row | change])


def test_other_columns_are_refused(tmp_path):
    with refused("val-00000-of-00001.parquet", "columns caption, image", "ref_list, answer, raw_anns"):
        opened(tmp_path, "other", [{"caption": "a", "image": None}])
