"""What words of Visual Genome's descriptions name, and what is said of damaged files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from e2e_vl.data.storage.record_errors import NotedErrors
from e2e_vl.data.visual_genome import read_region_boxes, read_region_graphs

MAN = {"object_id": 1, "x": 10, "y": 20, "w": 30, "h": 40, "name": "man", "synsets": ["man.n.01"]}
OTHER = MAN | {"object_id": 2, "x": 60}
HORSE = {"object_id": 3, "x": 0, "y": 0, "w": 5, "h": 6, "name": "Horse", "synsets": []}
FLAT = {"object_id": 4, "x": 0, "y": 0, "w": 5, "h": 0, "name": "grass", "synsets": ["grass.n.01"]}


def entity(start: int, end: int, name: str) -> dict:
    return {
        "entity_idx_start": start,
        "entity_idx_end": end,
        "entity_name": name,
        "synset_name": f"{name}.n.01",
    }


def region(number: int, phrase: str, entities: list, objects: list) -> dict:
    place = {"x": 5, "y": 6, "width": 70, "height": 80}
    return {"region_id": number, "phrase": phrase, "synsets": entities, "objects": objects, **place}


GRAPHS = [
    {"image_id": 7, "regions": []},
    {
        "image_id": 1,
        "regions": [
            region(12, "men on a horse", [entity(0, 3, "man"), entity(9, 14, "horse")], [MAN, OTHER, MAN, HORSE]),
            region(11, "the grass", [entity(4, 9, "grass")], [FLAT]),
            region(9, "é man", [entity(2, 5, "man"), entity(2, 9, "man"), entity(3, 3, "man")], [MAN]),
        ],
    },
]


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path, GRAPHS)


def write(folder: Path, content: object) -> Path:
    file = folder / "region_graphs.json"
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return file


def test_words_name_the_objects_of_their_synset_or_their_name(path, caplog):
    with caplog.at_level(logging.WARNING):
        found = read_region_graphs(path)
    phrases = found.of(12, "men on a horse")
    assert phrases.spans == ((0, 3), (9, 14)) and not phrases.is_complete
    assert [boxes.tolist() for boxes in phrases.boxes] == [[[10, 20, 40, 60], [60, 20, 90, 60]], [[0, 0, 5, 6]]]
    phrases = found.of(9, "é man")
    assert phrases.spans == ((2, 5),) and phrases.boxes[0].tolist() == [[10, 20, 40, 60]]
    assert found.of(11, "the grass") is None and found.of(1000, "a fox") is None and len(found) == 2
    assert "left out are 1 objects without an area and 2 words that are no characters" in caplog.text


def test_a_description_is_one_phrase_of_its_region(path):
    found = read_region_boxes(path)
    phrases = found.of(11, "the grass")
    assert phrases.spans == ((0, 9),) and phrases.boxes[0].tolist() == [[5, 6, 75, 86]] and len(found) == 3


@pytest.mark.parametrize(
    ("words", "spans"),
    [
        ("men on a horse ", ((0, 3), (9, 14))),
        ("men  on a horse", ((0, 3), (10, 15))),
        ("\tmen on a horse", ((1, 4), (10, 15))),
    ],
)
def test_descriptions_may_differ_in_white_space(path, caplog, words, spans):
    found = read_region_graphs(path)
    found.compare([(12, words)])
    assert "other descriptions" not in caplog.text
    phrases = found.of(12, words)
    assert phrases.spans == spans and [words[slice(*span)] for span in spans] == ["men", "horse"]
    assert [len(boxes) for boxes in phrases.boxes] == [2, 1]


def test_places_with_space_around_them_are_those_of_their_words(tmp_path):
    entities = [entity(0, 4, "man"), entity(0, 3, "man"), entity(3, 4, "man"), entity(3, 7, "hat")]
    hat = HORSE | {"name": "hat"}
    found = read_region_graphs(
        write(tmp_path, [{"image_id": 1, "regions": [region(3, "man hat", entities, [MAN, hat])]}])
    )
    assert found.of(3, "man hat").spans == ((0, 3), (4, 7))


def test_other_descriptions_have_no_phrases_and_are_counted(path, caplog):
    found = read_region_graphs(path)
    described = [(9, "é man"), (12, "a horse"), (1000, "a fox")]
    with caplog.at_level(logging.WARNING):
        found.compare(described)
    sentence = "region_graphs.json: 1 of 2 regions, region 12 the first of them, have other descriptions than"
    assert sentence in caplog.text
    errors = NotedErrors()
    found.compare(described, errors)
    assert sentence in next(iter(errors.sentences))
    assert found.of(12, "a horse") is None and found.of(9, "é man") is not None


def test_another_release_is_refused(path, tmp_path):
    found = read_region_graphs(path)
    with pytest.raises(ValueError, match=r"region_graphs\.json: 2 of 2 regions, region 12 .* use files of the same"):
        found.compare([(12, "a horse"), (9, "a man")])
    found.compare([(1000, "a fox")])
    (tmp_path / "empty").mkdir()
    read_region_graphs(write(tmp_path / "empty", [])).compare([(12, "a horse")])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"objects": [{"object_id": 1, "x": 1, "y": 1, "w": 1}]}, r"image 1: region 3: objects\[0\] has no 'h'"),
        ({"objects": [MAN | {"w": "9"}]}, r"image 1: region 3: objects\[0\]\.w is '9', expected a number"),
        ({"synsets": [{"entity_idx_start": 0}]}, r"image 1: region 3: synsets\[0\] has no 'entity_idx_end'"),
        (
            {"synsets": [entity("0", 3, "man")]},
            r"region 3: synsets\[0\]\.entity_idx_start is '0', expected a whole number",
        ),
        (
            {"objects": [MAN | {"synsets": [], "name": 3}]},
            r"image 1: region 3: objects\[0\]\.name is 3, expected a text or null",
        ),
        ({"region_id": "3"}, "image 1: region 3: region_id is '3', expected a whole number"),
        ({"phrase": None}, "image 1: region 3: phrase is None, expected a text"),
        ({"objects": None}, "image 1: region 3: objects is None, expected a list"),
    ],
)
def test_damaged_records_are_named(tmp_path, change, sentence):
    good = region(4, "man", [entity(0, 3, "man")], [MAN])
    bad = region(3, "man", [entity(0, 3, "man")], [MAN]) | change
    path = write(tmp_path, [{"image_id": 1, "regions": [bad, good]}])
    with pytest.raises(ValueError, match=sentence):
        read_region_graphs(path)
    errors = NotedErrors()
    assert len(read_region_graphs(path, errors)) == 1 and len(errors.sentences) == 1


def test_damaged_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="image number 0 has no 'regions'"):
        read_region_graphs(write(tmp_path, [{"image_id": 1}]))
    twice = region(4, "man", [entity(0, 3, "man")], [MAN])
    with pytest.raises(ValueError, match="region 4 is listed twice"):
        read_region_graphs(write(tmp_path, [{"image_id": 1, "regions": [twice, twice]}]))
    with pytest.raises(ValueError, match="the region graphs are not one JSON list"):
        read_region_graphs(write(tmp_path, {"1": []}))
