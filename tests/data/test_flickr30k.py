"""What the reader of Flickr30K Entities states: captions, phrases, boxes, what is left out, and damaged files."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.errors import UserError
from e2e_vl.config import DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.flickr30k import Flickr30KDataset, parse_sentence, read_annotation, read_image_ids, read_sentences
from tests.data.roads import open_dataset

CAPTIONS = (
    "[/EN#1/people A man] in [/EN#2/clothing/other a red shirt] near [/EN#3/scene the street] .",
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
def settings(tmp_path) -> DataSettings:
    for folder in ("photos", "Sentences", "Annotations"):
        (tmp_path / folder).mkdir()
    for name, captions in (("11", CAPTIONS), ("12", CAPTIONS[1:3]), ("13", CAPTIONS[3:])):
        Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(tmp_path / "photos" / f"{name}.jpg")
        (tmp_path / "Sentences" / f"{name}.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
        (tmp_path / "Annotations" / f"{name}.xml").write_text(XML.format(name=name), encoding="utf-8")
    (tmp_path / "train.txt").write_text("11\n12\n")
    (tmp_path / "val.txt").write_text("13\n")
    files = {"ids": "{split}.txt", "images": "photos", "sentences": "Sentences", "annotations": "Annotations"}
    return DataSettings(name="flickr30k", root=str(tmp_path), files=files)


def make(settings, split="train", boxes="gt", *, training=False, objects=False) -> Flickr30KDataset:
    return open_dataset(Flickr30KDataset, settings, split, boxes, objects=objects, training=training)


def test_captions_without_a_boxed_phrase_are_left_out(settings, tmp_path, caplog):
    dataset = make(settings)
    assert dataset.left_out == 4 and make(settings, "train+val").left_out == 4 and make(settings, "val").left_out == 0
    assert "train.txt: left out are 4 captions without a phrase that has a box" in caplog.text
    assert "val.txt" not in caplog.text
    assert len(dataset) == 2 and [list(texts) for texts in dataset.groups] == [[0, 1]]
    assert list(dataset.image_ids()) == ["11"]
    sample = dataset.sample((0, 1))
    [image] = sample.images
    assert image.size == (40, 50) and image.locate() == tmp_path / "photos" / "11.jpg"
    assert image.objects.boxes.tolist() == [[1, 2, 11, 32], [5, 6, 10, 20], [20, 2, 40, 32]]
    first, second = sample.texts
    assert first.words == "A man in a red shirt near the street ."
    assert first.metadata["phrases"] == ["A man", "a red shirt"] and first.metadata["phrase_types"][1] == [
        "clothing",
        "other",
    ]
    assert [first.words[slice(*span)] for span in first.truth.spans] == first.metadata["phrases"]
    assert (second.metadata["sentence"], second.metadata["phrase_ids"]) == (3, ["1", "4"])
    assert [boxes.tolist() for boxes in second.truth.boxes] == second.metadata["gt_boxes"]
    assert second.metadata["gt_boxes"] == [[[1, 2, 11, 32]], [[1, 2, 11, 32], [20, 2, 40, 32]]]
    assert second.metadata == json.loads(json.dumps(second.metadata))


def test_coordinates_may_begin_at_zero(settings):
    shifted = dataclasses.replace(settings, config={"coordinates": "zero_based"})
    sample = make(shifted).sample((0,))
    assert sample.texts[0].metadata["gt_boxes"][0] == [[0, 1, 10, 31]]
    assert sample.images[0].objects.boxes[0].tolist() == [0, 1, 10, 31]
    with pytest.raises(ValueError, match=r"data\.config\.coordinates is"):
        make(dataclasses.replace(settings, config={"coordinates": "one"}))


def test_splits_are_joined(settings):
    assert len(make(settings, "train+val")) == 3
    options = open_options(Flickr30KDataset, settings)
    assert list(Flickr30KDataset.texts_of(*options, "val")) == ["The man and two women ."]
    with pytest.raises(ValueError, match="image 13 is in the splits val and val"):
        make(settings, "val+val")


def test_classes_come_from_instances(settings, tmp_path):
    with pytest.raises(ValueError, match="annotated boxes have no classes of a detector"):
        make(settings, objects=True)
    image = {"id": 11, "file_name": "x.jpg", "width": 50, "height": 40}
    row = {"id": 1, "image_id": 11, "category_id": 3, "bbox": [1, 2, 3, 4]}
    content = {"images": [image], "annotations": [row], "categories": [{"id": 3, "name": "cup"}]}
    (tmp_path / "instances.json").write_text(json.dumps(content))
    own = dataclasses.replace(settings, files=settings.files | {"instances": "instances.json"})
    dataset = make(own, objects=True)
    assert dataset.sample((0,)).images[0].objects.boxes.tolist() == [[1, 2, 4, 6]] and dataset.class_names == ["cup"]
    with pytest.raises(ValueError, match=r"instances\.json: has no image 13"):
        make(own, "val", objects=True)


def test_no_caption_is_left(settings, tmp_path):
    (tmp_path / "none.txt").write_text("12\n")
    with pytest.raises(ValueError, match="no phrase of any caption has a box"):
        make(settings, "none")


def test_phrases_keep_their_places():
    sentence = parse_sentence("  So [/EN#7/people the man 's  dog] , [/EN#8/other it] ! ")
    assert sentence.words == "So the man 's dog , it !"
    assert [sentence.words[slice(*phrase.span)] for phrase in sentence.phrases] == ["the man 's dog", "it"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[/EN#1/people A man in", r"x\.txt, line 1: '\[/EN#1/people A man in' is no phrase"),
        ("[/EN#1 A man]", "is no phrase"),
        ("[/EN#1/people  ]", "has no words"),
    ],
)
def test_damaged_sentences_are_named(tmp_path, line, message):
    (tmp_path / "x.txt").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_sentences(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("</annotation>", "", "is not valid XML"),
        ("<width>50</width>", "", "the width is None; it must be a whole number"),
        ("<name>2</name>", "", r"object 1 has no name"),
        ("<xmin>5</xmin>", "", r"object 1: xmin is None"),
        ("<xmin>5</xmin>", "<xmin>wide</xmin>", r"object 1: xmin is 'wide'"),
        ("<xmin>5</xmin>", "<xmin>15</xmin>", r"object 1: the box \[15, 6, 10, 20\] is inverted"),
        ("<annotation>", '<!DOCTYPE a [<!ENTITY b "c">]><annotation>', "declares a document type"),
    ],
)
def test_damaged_annotations_are_named(tmp_path, old, new, message):
    path = tmp_path / "x.xml"
    path.write_text(XML.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_annotation(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1\na\n", "line 2: 'a' is no image id"),
        ("1\n2\n1\n", "line 3: image 1 is there twice"),
        ("\n", "there is no image id"),
    ],
)
def test_damaged_lists_of_images_are_named(tmp_path, content, message):
    path = Path(tmp_path / "ids.txt")
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_image_ids(path)


def test_brackets_without_an_end_take_one_pass():
    started = time.process_time()
    with pytest.raises(UserError, match="is no phrase such as"):
        parse_sentence("[/EN#1/a " * 20_000)
    with pytest.raises(UserError, match="is no phrase such as"):
        parse_sentence("[/EN#1/" * 20_000)
    assert time.process_time() - started < 2


def test_an_annotation_in_another_encoding(tmp_path):
    for encoding in ("rot13", "utf-7", "idna"):
        path = tmp_path / f"{encoding}.xml"
        path.write_text(f'<?xml version="1.0" encoding="{encoding}"?><annotation><size/></annotation>')
        with pytest.raises(UserError, match=rf"{encoding}\.xml: "):
            read_annotation(path)
    path.write_bytes('<!DOCTYPE x [<!ENTITY a "b">]><annotation/>'.encode("utf-16"))
    with pytest.raises(UserError, match="is not a UTF-8 text file"):
        read_annotation(path)


@pytest.mark.parametrize("width", ["\uff15\uff10", "5_0", "0x32", "1e400", "9" * 5000])
def test_numbers_that_are_not_written_as_numbers(tmp_path, width):
    path = tmp_path / "1.xml"
    path.write_text(XML.format(name="1").replace("<width>50", f"<width>{width}"), encoding="utf-8")
    with pytest.raises(UserError, match=r"1\.xml: the width is .* whole number"):
        read_annotation(path)
