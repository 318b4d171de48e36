"""Flickr30K Entities: captions, phrases, boxes, what is left out, and damaged files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from e2e_vl.config import DataConfig
from e2e_vl.data import table_files
from e2e_vl.data.base import open_options
from e2e_vl.data.flickr30k import Flickr30KDataset, read_annotation, read_image_ids, read_sentences
from tests.data.helpers import assert_same_from_tables, open_dataset, refused, with_files, with_options, write_json

CAPTIONS = (
    " [/EN#1/people A man ] in [/EN#2/clothing/other a  red shirt] near [/EN#3/scene the street] .",
    "[/EN#0/notvisual It] rains on [/EN#3/scene the street] .",
    "Nobody is here .",
    "[/EN#1/people The man] and [/EN#4/people two women] .",
)
XML = """<annotation><filename>{name}.jpg</filename><size><width>50</width><height>40</height><depth>3</depth></size>
<object><name>1</name><name>4</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>11</xmax><ymax>32</ymax></bndbox></object>
<object><name>2</name><bndbox><xmin>5</xmin><ymin>6</ymin><xmax>10</xmax><ymax>20</ymax></bndbox></object>
<object><name>4</name><bndbox><xmin>20</xmin><ymin>2</ymin><xmax>40</xmax><ymax>32</ymax></bndbox></object>
<object><name>3</name><scene>1</scene><nobndbox>0</nobndbox></object></annotation>"""


@pytest.fixture
def settings(tmp_path) -> DataConfig:
    for folder in ("photos", "Sentences", "Annotations"):
        (tmp_path / folder).mkdir()
    for name, captions in (("11", CAPTIONS), ("12", CAPTIONS[1:3]), ("13", CAPTIONS[3:])):
        Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(tmp_path / "photos" / f"{name}.jpg")
        (tmp_path / "Sentences" / f"{name}.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
        (tmp_path / "Annotations" / f"{name}.xml").write_text(XML.format(name=name), encoding="utf-8")
    (tmp_path / "train.txt").write_text("11\n12\n")
    (tmp_path / "val.txt").write_text("13\n")
    (tmp_path / "none.txt").write_text("12\n")
    files = {"ids": "{split}.txt", "images": "photos", "sentences": "Sentences", "annotations": "Annotations"}
    return DataConfig(name="flickr30k", root=str(tmp_path), files=files)


def make(settings, split="train", boxes="gt", *, training=False, objects=False) -> Flickr30KDataset:
    return open_dataset(Flickr30KDataset, settings, split, boxes, objects=objects, training=training)


def test_captions_without_a_boxed_phrase_are_left_out(settings, tmp_path, caplog):
    dataset = make(settings)
    assert dataset.left_out == 4 and make(settings, "train+val").left_out == 4 and make(settings, "val").left_out == 0
    assert "skipped 4 captions without a phrase that has a box" in caplog.text
    assert len(dataset) == 2 and [list(texts) for texts in dataset.groups] == [[0, 1]]
    assert list(dataset.image_ids()) == ["11"]
    sample = dataset.sample((0, 1))
    [image] = sample.images
    assert image.size == (40, 50) and image.locate() == tmp_path / "photos" / "11.jpg"
    assert image.objects.boxes.tolist() == [[1, 2, 11, 32], [5, 6, 10, 20], [20, 2, 40, 32]]
    first, second = sample.texts
    assert first.words == "A man in a red shirt near the street ."
    assert [first.words[slice(*span)] for span in first.truth.spans] == ["A man", "a red shirt"]
    assert first.truth.types[1] == ("clothing", "other")
    assert [first.words[slice(*span)] for span in first.phrases.spans] == ["A man", "a red shirt", "the street"]
    assert [len(boxes) for boxes in first.phrases.boxes] == [1, 1, 0] and first.phrases.is_complete
    assert (second.metadata["sentence"], second.truth.entities) == (3, ("1", "4"))
    boxes = [[[1, 2, 11, 32]], [[1, 2, 11, 32], [20, 2, 40, 32]]]
    assert [phrase_boxes.tolist() for phrase_boxes in second.truth.boxes] == boxes
    assert second.metadata == json.loads(json.dumps(second.metadata))


@pytest.mark.parametrize("odd", ["<xmax>1</xmax>", "<xmax>0</xmax>"])
def test_empty_boxes_are_skipped(settings, tmp_path, caplog, odd):
    path = tmp_path / "Annotations" / "11.xml"
    edges = "<xmin>1</xmin><ymin>2</ymin><xmax>11</xmax>"
    path.write_text(path.read_text().replace(edges, f"<xmin>1</xmin><ymin>2</ymin>{odd}"))
    dataset = make(settings)
    sample = dataset.sample((0,))
    assert sample.images[0].objects.boxes.tolist() == [[5, 6, 10, 20], [20, 2, 40, 32]]
    [text] = sample.texts
    assert [text.words[slice(*span)] for span in text.truth.spans] == ["a red shirt"], (
        "the other phrase has lost its only box"
    )
    assert "skipped 1 empty boxes" in caplog.text and "11.xml" in caplog.text


def test_an_image_that_is_listed_twice_is_read_once(settings, tmp_path, caplog):
    (tmp_path / "train.txt").write_text("11\n12\n11\n")
    assert len(make(settings)) == 2 and "train.txt: skipped 1 repeats of image ids: 11" in caplog.text


def test_coordinates_may_begin_at_zero(settings):
    shifted = with_options(settings, coordinates="zero_based")
    sample = make(shifted).sample((0,))
    assert sample.texts[0].truth.boxes[0].tolist() == [[0, 1, 10, 31]]
    assert sample.images[0].objects.boxes[0].tolist() == [0, 1, 10, 31]


def test_splits_are_joined(settings):
    assert len(make(settings, "train+val")) == 3
    options = open_options(Flickr30KDataset, settings)
    assert list(Flickr30KDataset.texts_of(*options, "val")) == ["The man and two women ."]
    with refused("val+val", "13", "twice"):
        make(settings, "val+val")
    with refused("none"):
        make(settings, "none")


@pytest.mark.parametrize("split", ["train", "val+train"])
def test_tables_give_the_same_captions(settings, tmp_path, monkeypatch, caplog, split):
    path = tmp_path / "Annotations" / "13.xml"
    path.write_text(path.read_text().replace("<xmax>11</xmax>", "<xmax>1</xmax>"))

    def open_split() -> Flickr30KDataset:
        dataset = make(settings, split)
        assert dataset.left_out == 4
        return dataset

    assert_same_from_tables(tmp_path, monkeypatch, caplog, open_split)
    monkeypatch.undo()
    monkeypatch.setattr(table_files, "MIN_SOURCE_BYTES", 0)
    path = tmp_path / "Sentences" / "11.txt"
    path.write_text(path.read_text() + "[/EN#1/people He] .\n")
    dataset = make(settings, split)
    assert "He ." in [dataset[text] for text in range(len(dataset))], "a file in a folder has changed"


def test_classes_come_from_instances(settings, tmp_path):
    with refused("data.files.instances"):
        make(settings, objects=True)
    image = {"id": 11, "file_name": "x.jpg", "width": 50, "height": 40}
    row = {"id": 1, "image_id": 11, "category_id": 3, "bbox": [1, 2, 3, 4]}
    content = {"images": [image], "annotations": [row], "categories": [{"id": 3, "name": "cup"}]}
    write_json(tmp_path / "instances.json", content)
    own = with_files(settings, instances="instances.json")
    dataset = make(own, objects=True)
    assert dataset.sample((0,)).images[0].objects.boxes.tolist() == [[1, 2, 4, 6]] and dataset.class_names == ["cup"]
    with refused("instances.json", "13"):
        make(own, "val", objects=True)


@pytest.mark.parametrize(
    ("read", "content", "part"),
    [
        (read_sentences, "ok\n[/EN#1/people A man in", "line 2"),
        (read_sentences, "[/EN#1 A man]", "not a phrase"),
        (read_sentences, "[/EN#1/people  ]", "not a phrase"),
        (read_annotation, XML.replace("</annotation>", ""), "no element found"),
        (read_annotation, XML.replace("<xmin>5</xmin>", "<xmin>wide</xmin>"), "wide"),
        (read_image_ids, "\n", "list of image ids"),
    ],
)
def test_bad_files_are_named(tmp_path, read, content, part):
    (tmp_path / "x.file").write_text(content)
    with refused("x.file", part):
        read(tmp_path / "x.file")
    with refused("gone.file"):
        read(tmp_path / "gone.file")
