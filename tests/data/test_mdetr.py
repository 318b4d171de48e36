"""MDETR's files: which words are phrases, which boxes they have, where images are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.mdetr import MDETRDataset
from e2e_vl.samples import EntityPhrases, ReferredBoxes
from tests.data.helpers import assert_same_from_tables, open_dataset, refused, with_files, with_options, write_json

CAPTION = {"id": 0, "file_name": "7.jpg", "height": 60, "width": 100, "caption": "a red hat on a man in red"}
BOX = {"id": 0, "image_id": 0, "bbox": [10, 20, 30, 40], "area": 1200, "iscrowd": 0, "category_id": 1}
HAT = BOX | {"tokens_positive": [[0, 1], [2, 5], [6, 9]]}  # three words with only spaces between them
MAN = BOX | {"id": 1, "bbox": [1, 2, 3, 4], "tokens_positive": [[13, 18], [22, 25]]}  # two phrases


@pytest.fixture
def settings(tmp_path: Path) -> DataConfig:
    return DataConfig(name="mdetr", root=str(tmp_path), files={"annotations": "{split}.json", "images": "images"})


def write(folder: Path, images: list[dict[str, Any]], annotations: list[dict[str, Any]], split: str = "train") -> Path:
    return write_json(folder / f"{split}.json", {"images": images, "annotations": annotations, "categories": []})


def opened(settings: DataConfig, split: str = "train", **options) -> MDETRDataset:
    return open_dataset(MDETRDataset, with_options(settings, **options), split, phrases=True)


def phrases_of(dataset: MDETRDataset, text: int = 0) -> dict[str, list[list[float]]]:
    """The boxes of each phrase of a text, by its words."""
    [sample_text] = dataset.sample([text]).texts
    phrases = sample_text.phrases
    words = [sample_text.words[slice(*span)] for span in phrases.spans]
    return {name: boxes.tolist() for name, boxes in zip(words, phrases.boxes, strict=True)}


def test_neighbouring_words_are_one_phrase_and_others_are_phrases_of_their_own(settings, tmp_path):
    write(tmp_path, [CAPTION], [HAT, MAN, BOX | {"id": 2, "bbox": [50, 0, 9, 9], "tokens_positive": [[0, 9]]}])
    dataset = opened(settings)
    assert phrases_of(dataset) == {
        "a red hat": [[10, 20, 40, 60], [50, 0, 59, 9]],
        "a man": [[1, 2, 4, 6]],
        "red": [[1, 2, 4, 6]],
    }
    [text] = dataset.sample([0]).texts
    assert not text.phrases.is_complete and isinstance(text.truth, EntityPhrases)
    assert text.truth.spans == text.phrases.spans


def test_listed_phrases_are_left_as_they_are(settings, tmp_path):
    listed = CAPTION | {"tokens_positive_eval": [[[0, 1]], [[2, 9]]], "sentence_id": 3, "original_img_id": 77}
    sides = {"height": "60", "width": "100", "dataset_name": "flickr"}  # strings in the files of Flickr30K Entities
    write(tmp_path, [listed | sides], [BOX | {"tokens_positive": [[0, 1], [2, 9]]}])
    dataset = opened(settings)
    assert phrases_of(dataset) == {"a": [[10, 20, 40, 60]], "red hat": [[10, 20, 40, 60]]}
    sample = dataset.sample([0])
    assert sample.images[0].size == (60, 100) and sample.images[0].image_aliases == (("flickr", "77"),)
    assert sample.texts[0].metadata == {"sent_id": 0, "image_id": 77, "sentence": 3}


def test_captions_of_one_photo_are_a_group_and_sources_have_folders(settings, tmp_path):
    captions = [
        CAPTION | {"data_source": "coco", "original_id": 7},
        CAPTION | {"id": 1, "file_name": "9.jpg", "data_source": "vg", "original_id": 9},
        CAPTION | {"id": 2, "data_source": "coco", "original_id": 7, "caption": "a hat"},
    ]
    write(tmp_path, captions, [HAT, MAN | {"image_id": 1}])
    dataset = opened(with_files(settings, images="photos/{source}"), image_folders={"coco": "coco/train2014"})
    assert list(dataset.groups) == [[0, 2], [1]] and list(dataset.image_ids()) == ["7", "9"]
    images = [dataset.sample(texts).images[0] for texts in dataset.groups]
    assert [image.locate() for image in images] == [
        tmp_path / "photos/coco/train2014/7.jpg",
        tmp_path / "photos/vg/9.jpg",
    ]
    assert [image.image_aliases for image in images] == [(), (("vg", "9"),)]
    assert phrases_of(dataset, 2) == {}, "a caption without boxes is a caption"
    write(tmp_path, [captions[0], captions[1] | {"file_name": "7.jpg"}], [])
    with refused("train.json", "image 1 is 7.jpg of 'vg'", "different names"):
        opened(settings)


def test_expressions_refer_to_their_boxes_and_those_marked_as_empty_to_none(settings, tmp_path, caplog):
    nothing = MAN | {"image_id": 1, "bbox": [0, 0, 0, 0], "empty": True, "category_id": -1, "iscrowd": -1}
    captions = [CAPTION, CAPTION | {"id": 1}, CAPTION | {"id": 2}]
    write(tmp_path, captions, [HAT, MAN, nothing, BOX | {"image_id": 2, "tokens_positive": [[0, 9]], "iscrowd": 1}])
    dataset = opened(settings, texts="expressions")
    boxes = ((10.0, 20.0, 40.0, 60.0), (1.0, 2.0, 4.0, 6.0))
    assert list(dataset.truths()) == [ReferredBoxes(boxes), ReferredBoxes(())]
    assert phrases_of(dataset, 1) == {"a man": [], "red": []}
    assert "skipped 1 expressions without a box: 2" in caplog.text
    captions_with_phrases = opened(settings)
    assert len(captions_with_phrases) == 3 and captions_with_phrases.sample([1]).texts[0].truth.spans == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [10, 20, 0, 40]}, "1 boxes without an area, by text: 0"),
        ({"bbox": [100, 20, 5, 40]}, "1 boxes outside their image, by text: 0"),
        ({"tokens_positive": [[20, 200]]}, "1 phrases outside their text, by text: 0"),
        ({"tokens_positive": [[1, 2]]}, "1 phrases outside their text, by text: 0"),
    ],
)
def test_odd_annotations_are_skipped_and_counted(settings, tmp_path, caplog, change, message):
    write(tmp_path, [CAPTION], [HAT | change, MAN])
    assert phrases_of(opened(settings)) == {"a man": [[1, 2, 4, 6]], "red": [[1, 2, 4, 6]]}
    assert f"skipped {message}" in caplog.text


def test_blank_captions_are_skipped(settings, tmp_path, caplog):
    write(tmp_path, [CAPTION, CAPTION | {"id": 1, "caption": " "}], [HAT])
    assert len(opened(settings)) == 1 and "skipped 1 blank captions: 1" in caplog.text


@pytest.mark.parametrize(
    ("images", "annotations", "parts"),
    [
        ([CAPTION], [HAT | {"image_id": 5}], ["train.json", "image 5", "does not list"]),
        ([CAPTION], [HAT | {"bbox": [1, 2, 3]}], ["train.json: entry 0", "bbox"]),
        ([CAPTION | {"width": "wide"}], [HAT], ["train.json: entry 0", "width"]),
        ([CAPTION, CAPTION], [HAT], ["train.json", "0 is listed twice"]),
        ([CAPTION], [HAT | {"bbox": [0.1, 0.2, 0.3, 0.4]}], ["train.json", "normalised"]),
    ],
)
def test_what_cannot_be_read_is_named(settings, tmp_path, images, annotations, parts):
    write(tmp_path, images, annotations)
    with refused(*parts):
        opened(settings)


def test_corners_in_place_of_sides_are_warned_of(settings, tmp_path, caplog):
    write(tmp_path, [CAPTION], [HAT | {"bbox": [60, 30, 95, 58]}])
    opened(settings)
    assert "they look like corners [x1, y1, x2, y2]" in caplog.text


def test_joined_splits_and_tables(settings, tmp_path, monkeypatch, caplog):
    write(tmp_path, [CAPTION], [HAT])
    write(tmp_path, [CAPTION | {"id": 1, "file_name": "8.jpg"}], [MAN | {"image_id": 1}], "val")
    assert_same_from_tables(tmp_path, monkeypatch, caplog, lambda: opened(settings, "train+val", texts="expressions"))
    dataset = opened(settings, "train+val", texts="expressions")
    assert [dataset.split_index(text) for text in range(2)] == [0, 1]
    assert list(MDETRDataset.texts_of(dataset.files, dataset.options, "train+val")) == [CAPTION["caption"]] * 2
