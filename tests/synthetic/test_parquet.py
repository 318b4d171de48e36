"""RefCOCO+ in parquet files, as the reader gives it, beside REFER's files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.data.refcoco_parquet import ParquetRefCOCODataset
from e2e_vl.synthetic.generate import WRITERS, make_scenes, writable_formats
from tests.data.helpers import open_dataset, refused

try:
    import pyarrow
except ImportError:
    pyarrow = None
needs_pyarrow = pytest.mark.skipif(
    pyarrow is None, reason='pyarrow is not installed; pip install "e2e-vl[parquet]" lets this test run'
)
REFS = {"images": "images/train2014", "instances": "refcoco+/instances.json", "refs": "refcoco+/refs(unc).p"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "data"
    make_scenes(path, scenes={"train": 40, "val": 5}, seed=5, formats=["refcoco+", "refcoco+_parquet"])
    return path


@needs_pyarrow
@pytest.mark.parametrize("layout", ["images", "objects", "refs"])
@pytest.mark.parametrize("boxes", ["online", "gt"])
def test_layouts_give_what_refer_gives(folder, layout, boxes):
    official = DataConfig(name="refcoco", root=str(folder), files=REFS)
    files = {"parquet": f"refcoco+_parquet/{layout}/{{split}}-*.parquet", "images": REFS["images"]}
    settings = DataConfig(name="refcoco_parquet", root=str(folder), files={**files, "instances": REFS["instances"]})
    expected = open_dataset(RefCOCODataset, official, "train", boxes, phrases=True)
    dataset = open_dataset(ParquetRefCOCODataset, settings, "train", boxes, phrases=True)
    assert list(dataset.groups) == list(expected.groups) and list(dataset.image_ids()) == list(expected.image_ids())
    for texts in dataset.groups:
        sample = dataset.sample(texts)
        expected_sample = expected.sample(texts)
        [image], [expected_image] = sample.images, expected_sample.images
        content = image.locate()
        content = content.read_bytes() if isinstance(content, Path) else content.content
        assert content == expected_image.locate().read_bytes()
        assert (image.objects is None) == (boxes == "online")
        for text, other in zip(sample.texts, expected_sample.texts, strict=True):
            assert (text.words, text.truth.boxes) == (other.words, other.truth.boxes)
            assert text.phrases.spans == other.phrases.spans
            if layout != "objects":  # which does not name annotations and sentences
                assert text.truth.ann_ids == other.truth.ann_ids
                assert other.metadata.items() >= text.metadata.items()


@needs_pyarrow
def test_several_groups_of_rows(folder):
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(folder / "refcoco+_parquet/objects/train-00000-of-00001.parquet")
    assert file.num_row_groups > 1


def test_without_the_package_all_other_formats_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert writable_formats() == [name for name in WRITERS if name != "refcoco+_parquet"]
    with refused("pyarrow", "pip install 'e2e-vl[parquet]'"):
        make_scenes(tmp_path / "data", scenes={"train": 1}, formats=["refcoco+_parquet"])
    assert not (tmp_path / "data").exists()
