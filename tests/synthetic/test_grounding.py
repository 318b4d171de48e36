"""The formats of grounding pre-training, as their readers give them, beside the annotations of COCO and REFER."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from e2e_vl.config import DataConfig
from e2e_vl.data.base import RecordDataset, VLDataset
from e2e_vl.data.mdetr import MDETRDataset
from e2e_vl.data.odvg import ODVGDataset
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.registry import DATASETS
from e2e_vl.synthetic.config import LanguageConfig
from e2e_vl.synthetic.generate import make_scenes
from tests.data.helpers import open_dataset

IMAGES = "images/train2014"
REFS = {"images": IMAGES, "instances": "refcoco+/instances.json", "refs": "refcoco+/grefs(unc).json"}
FORMATS = ["refcoco+", "mdetr", "odvg"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes with expressions of which some are true of nothing."""
    path = tmp_path_factory.mktemp("grounding") / "data"
    make_scenes(path, scenes={"train": 24, "val": 6}, seed=5, language=LanguageConfig(no_target=0.2), formats=FORMATS)
    return path


@pytest.fixture(scope="module")
def boxes_of_image(folder) -> dict[str, set[tuple[float, ...]]]:
    """The boxes of all objects, xyxy, by the name of the image's file."""
    coco = COCO(str(folder / "refcoco+" / "instances.json"))
    boxes: dict[str, set[tuple[float, ...]]] = {}
    for image in coco.dataset["images"]:
        corners = [(x, y, x + w, y + h) for x, y, w, h in (item["bbox"] for item in coco.imgToAnns[image["id"]])]
        boxes[Path(image["file_name"]).stem] = set(corners)
    return boxes


def opened(folder: Path, name: str, annotations: str, images: str = IMAGES, **options) -> RecordDataset:
    settings = DataConfig(
        name=name, root=str(folder), files={"annotations": annotations, "images": images}, config=options
    )
    return open_dataset(DATASETS[name].cls, settings, "train", phrases=True)


def expressions(dataset: VLDataset) -> list[tuple[str, set[tuple[float, ...]]]]:
    """Each expression with the boxes that it refers to."""
    rows = []
    for texts in dataset.groups:
        for text in dataset.sample(texts).texts:
            rows.append((text.words, {tuple(map(float, box)) for box in text.truth.boxes}))
    return rows


def test_expressions_are_those_of_refer(folder):
    settings = DataConfig(name="refcoco", root=str(folder), files=REFS)
    expected = expressions(open_dataset(RefCOCODataset, settings, "train", phrases=True))
    with_target = [row for row in expected if row[1]]
    assert len(with_target) < len(expected), "some refer to nothing"
    mdetr = opened(folder, "mdetr", "mdetr/finetune_grefcoco_{split}.json", texts="expressions")
    assert sorted(expressions(mdetr)) == sorted(expected)
    mdetr = opened(folder, "mdetr", "mdetr/finetune_refcoco+_{split}.json", texts="expressions")
    assert sorted(expressions(mdetr)) == sorted(with_target)
    odvg = opened(folder, "odvg", "odvg/{split}_rec.jsonl", texts="expressions")
    assert sorted(expressions(odvg)) == sorted(with_target)


def grounded(dataset: RecordDataset) -> dict[tuple[str, str], dict[str, list[list[float]]]]:
    """Image and words of each caption that names something -> the boxes of each phrase."""
    captions = {}
    for texts in dataset.groups:
        sample = dataset.sample(texts)
        [image] = sample.images
        with Image.open(image.locate()) as photo:
            assert photo.size == image.size[::-1]
        for text in sample.texts:
            named = {}
            for span, boxes in zip(text.phrases.spans, text.phrases.boxes, strict=True):
                named[text.words[slice(*span)]] = sorted(boxes.tolist())
            if named:
                captions[image.id, text.words] = named
    return captions


def test_captions_of_both_formats_name_the_same_objects(folder, boxes_of_image):
    mdetr = grounded(opened(folder, "mdetr", "mdetr/final_flickr_separateGT_{split}.json"))
    odvg = grounded(opened(folder, "odvg", "odvg/{split}_vg.jsonl"))
    assert mdetr == odvg and len(mdetr) > 60
    counts = set()
    for (image_id, _), named in mdetr.items():
        for boxes in named.values():
            assert {tuple(box) for box in boxes} <= boxes_of_image[image_id]
            counts.add(len(boxes))
    assert {1, 2} <= counts, "a phrase may name several objects"
    lines = (folder / "odvg" / "train_vg.jsonl").read_text().splitlines()
    regions = [region for line in lines for region in json.loads(line)["grounding"]["regions"]]
    assert {"tokens_positive" in region for region in regions} == {True, False}, "both kinds of files"


def test_mixed_captions_have_the_first_phrase_of_each_expression(folder):
    folders = {"coco": IMAGES, "vg": "mdetr/vg"}
    mixed = opened(folder, "mdetr", "mdetr/final_mixed_{split}.json", "{source}", image_folders=folders)
    single = opened(folder, "mdetr", "mdetr/finetune_refcoco+_{split}.json")
    sources = set()
    for mixed_texts, single_texts in zip(mixed.groups, single.groups, strict=True):
        sample = mixed.sample(mixed_texts)
        [text] = sample.texts
        assert sample.images[0].locate().is_file()
        sources.add(sample.images[0].locate().parent.name)
        phrases = [(text.words[slice(*span)], boxes) for span, boxes in zip(*spans_and_boxes(text), strict=True)]
        expected = []
        for other in single.sample(single_texts).texts:
            [span], [boxes] = spans_and_boxes(other)
            expected.append((other.words[slice(*span)], boxes))
        assert phrases == expected, "words with spans of their own are joined"
    assert sources == {"train2014", "vg"}


def spans_and_boxes(text) -> tuple[list[tuple[int, int]], list[list[list[float]]]]:
    return list(text.phrases.spans), [boxes.tolist() for boxes in text.phrases.boxes]


def test_class_names_of_all_objects(folder, boxes_of_image):
    dataset = opened(folder, "odvg", "odvg/{split}_od.jsonl")
    assert len(dataset) == 24
    for texts in dataset.groups:
        sample = dataset.sample(texts)
        [text] = sample.texts
        boxes = np.concatenate(text.phrases.boxes).tolist()
        assert {tuple(box) for box in boxes} == boxes_of_image[sample.images[0].id]
        assert " . ".join(text.words[slice(*span)] for span in text.phrases.spans) + " ." == text.words
    assert isinstance(dataset, ODVGDataset) and not isinstance(dataset, MDETRDataset)
