"""Visual Genome: texts, answers, where images are, which of them COCO has, and what descriptions name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.base import open_options
from e2e_vl.data.visual_genome import VisualGenomeDataset, read_region_graphs
from e2e_vl.samples import CorrectAnswer
from tests.data.helpers import assert_same_from_tables, open_dataset, refused, with_files, with_options, write_json

IMAGES = [
    {"image_id": 1, "width": 30, "height": 20, "url": "https://host/VG_100K_2/1.jpg", "coco_id": None},
    {"image_id": 5, "width": 40, "height": 10, "url": "https://host/VG_100K/5.jpg", "coco_id": 99},
    {"image_id": 6, "width": 40, "height": 10, "url": "https://host/VG_100K/6.jpg", "coco_id": None},
]
PLACE = {"x": 5, "y": 6, "width": 70, "height": 80}
REGIONS = [
    {"id": 1, "regions": [{"region_id": n, "phrase": f"phrase {n}", **PLACE} for n in (11, 12)]},
    {"id": 5, "regions": [{"region_id": 51, "phrase": "red hat"}]},
    {"id": 6, "regions": []},
]
QUESTIONS = [
    {"id": 5, "qas": [{"qa_id": 501, "question": "What color?", "answer": "Red."}]},
    {"id": 1, "qas": [{"qa_id": 101, "question": "Who?", "answer": "A man."}]},
]
MAN = {"object_id": 1, "x": 10, "y": 20, "w": 30, "h": 40, "name": "man", "synsets": ["man.n.01"]}
OTHER = MAN | {"object_id": 2, "x": 60}
HORSE = {"object_id": 3, "x": 0, "y": 0, "w": 5, "h": 6, "name": "Horse", "synsets": []}
FLAT = {"object_id": 4, "x": 0, "y": 0, "w": 5, "h": 0, "name": "grass", "synsets": ["grass.n.01"]}


@pytest.fixture
def settings(tmp_path: Path) -> DataConfig:
    contents = {"image_data": IMAGES, "regions": REGIONS, "questions": QUESTIONS}
    files = {key: write_json(tmp_path / f"{key}.json", content).name for key, content in contents.items()}
    return DataConfig(name="visual_genome", root=str(tmp_path), files=files | {"images": "images"})


def opened(settings: DataConfig, *, phrases: bool = False, **options) -> VisualGenomeDataset:
    return open_dataset(VisualGenomeDataset, with_options(settings, **options), "all", phrases=phrases)


def test_regions_are_captions(settings, tmp_path):
    dataset = opened(settings)
    assert [dataset[number] for number in range(len(dataset))] == ["phrase 11", "phrase 12", "red hat"]
    assert list(dataset.image_ids()) == ["1", "5"] and list(dataset.truths()) == [None] * 3
    assert not dataset.has_truths and not dataset.has_phrases
    sample = dataset.sample(dataset.groups[0])
    [image] = sample.images
    assert (image.id, image.size) == ("1", (20, 30))
    assert image.locate() == tmp_path / "images" / "VG_100K_2" / "1.jpg"
    assert sample.texts[1].metadata == {"region_id": 12}
    assert sample.pool is dataset and list(sample.own_texts) == [0, 1]
    [image] = opened(settings, use_folders=False).sample([2]).images
    assert image.locate() == tmp_path / "images" / "5.jpg"
    names = [dataset.sample(texts).images[0].image_aliases for texts in dataset.groups]
    assert names == [(("vg", "1"),), (("vg", "5"), ("coco", "99"))]


def test_questions_have_one_answer(settings):
    dataset = opened(settings, texts="questions")
    assert [dataset[0], dataset[1]] == ["What color?", "Who?"]
    assert list(dataset.truths()) == [CorrectAnswer("Red."), CorrectAnswer("A man.")]
    assert dataset.sample([1]).texts[0].metadata == {"qa_id": 101}
    own = with_options(settings, texts="questions")
    found = VisualGenomeDataset.answers_of(*open_options(VisualGenomeDataset, own), "all")
    assert found == {501: "Red.", 101: "A man."}


def test_images_that_coco_has(settings):
    assert list(opened(settings, coco="without").image_ids()) == ["1"]
    assert list(opened(settings, coco="only", texts="questions").image_ids()) == ["5"]


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"phrase": " "}, ["phrase 12", "red hat"], "1 blank descriptions: 11"),
        ({"width": 0}, ["phrase 11", "phrase 12", "red hat"], "1 boxes of regions without an area"),
        ({"y": -904}, ["phrase 11", "phrase 12", "red hat"], "1 boxes of regions outside their image"),  # as 5851305
        ({"y": -2}, ["phrase 11", "phrase 12", "red hat"], ""),
    ],
)
def test_odd_regions_are_skipped_and_counted(settings, tmp_path, caplog, change, words, message):
    [first, second] = REGIONS[0]["regions"]
    write_json(tmp_path / "regions.json", [{"id": 1, "regions": [first | change, second]}, *REGIONS[1:]])
    dataset = opened(settings, phrases=True)
    assert [dataset[number] for number in range(len(dataset))] == words
    assert f"skipped {message}" in caplog.text if message else not caplog.text
    phrases = {text.id: dataset._phrases(text) for text in dataset.texts}
    assert (phrases.get(11) is None) == bool(message) and phrases[12] is not None


def test_questions_without_words_or_an_answer_are_skipped(settings, tmp_path, caplog):
    odd = [{"qa_id": 7, "question": " ", "answer": "a"}, {"qa_id": 8, "question": "b", "answer": ""}]
    write_json(tmp_path / "questions.json", [*QUESTIONS, {"id": 6, "qas": odd}])
    assert len(opened(settings, texts="questions")) == 2
    assert "skipped 2 questions that are blank or have a blank answer: 7; 8" in caplog.text


@pytest.mark.parametrize(("file", "content", "key"), [("regions", REGIONS, "regions"), ("questions", QUESTIONS, "qas")])
def test_repeated_texts_are_skipped_and_one_id_of_two_is_named(settings, tmp_path, caplog, file, content, key):
    number = len(opened(settings, texts=file))
    [first, *rest] = [row for row in content if row[key]]
    [text, *others] = first[key]
    write_json(tmp_path / f"{file}.json", [first | {key: [text, text, *others]}, *rest])
    assert len(opened(settings, texts=file)) == number and "that repeat an earlier one" in caplog.text
    word = "phrase" if key == "regions" else "question"
    write_json(tmp_path / f"{file}.json", [first | {key: [text, text | {word: "other"}, *others]}, *rest])
    with refused(f"{file}.json", "listed twice"):
        opened(settings, texts=file)


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("image_data", IMAGES[:1], ["image_data.json", "image 5"]),
        ("image_data", [*IMAGES, IMAGES[0]], ["image_data.json", "1", "twice"]),
        ("regions", [{"id": 1, "regions": [{"region_id": 3}]}], ["regions.json", "regions[0]", "phrase"]),
        ("regions", REGIONS[2:], ["regions.json"]),
    ],
)
def test_bad_files_are_named(settings, tmp_path, file, content, parts):
    write_json(tmp_path / f"{file}.json", content)
    with refused(*parts):
        opened(settings)


def entity(start: int, end: int, name: str) -> dict:
    return {"entity_idx_start": start, "entity_idx_end": end, "entity_name": name, "synset_name": f"{name}.n.01"}


def region(number: int, phrase: str, entities: list, objects: list) -> dict:
    return {"region_id": number, "phrase": phrase, "synsets": entities, "objects": objects, **PLACE}


def test_words_name_the_objects_of_their_synset_or_their_name(tmp_path, caplog):
    regions = [
        region(12, "men on a horse", [entity(0, 3, "man"), entity(9, 14, "horse")], [MAN, OTHER, MAN, HORSE]),
        region(11, "the grass", [entity(4, 9, "grass")], [FLAT]),
        region(9, "é man", [entity(1, 5, "man"), entity(2, 9, "man"), entity(3, 3, "man")], [MAN]),
    ]
    path = write_json(tmp_path / "graphs.json", [{"image_id": 7, "regions": []}, {"image_id": 1, "regions": regions}])
    with caplog.at_level(logging.WARNING):
        found = read_region_graphs(path)
    phrases = found[12].of("men on a horse")
    assert phrases.spans == ((0, 3), (9, 14)) and not phrases.is_complete
    assert [boxes.tolist() for boxes in phrases.boxes] == [[[10, 20, 40, 60], [60, 20, 90, 60]], [[0, 0, 5, 6]]]
    phrases = found[9].of("é man")
    assert phrases.spans == ((2, 5),) and phrases.boxes[0].tolist() == [[10, 20, 40, 60]]
    assert 11 not in found and found[12].of("a horse") is None
    assert "skipped 1 objects with empty boxes and 2 phrases outside" in caplog.text
    for words, spans in (
        ("men on a horse ", ((0, 3), (9, 14))),
        ("men  on a horse", ((0, 3), (10, 15))),
        ("\tmen on a horse", ((1, 4), (10, 15))),
    ):
        phrases = found[12].of(words)
        assert phrases.spans == spans and [words[slice(*span)] for span in spans] == ["men", "horse"]


@pytest.mark.parametrize("options", [{}, {"coco": "only"}, {"texts": "questions"}])
def test_tables_give_the_same_texts(settings, tmp_path, monkeypatch, caplog, options):
    write_json(tmp_path / "regions.json", [*REGIONS, {"id": 5, "regions": [{"region_id": 52, "phrase": " "}]}])
    graphs = [region(51, "red hat", [entity(0, 3, "red")], [FLAT, MAN | {"name": "red"}])]
    write_json(tmp_path / "graphs.json", [{"image_id": 5, "regions": graphs}])
    settings = with_files(settings, region_graphs="graphs.json")
    assert_same_from_tables(tmp_path, monkeypatch, caplog, lambda: opened(settings, phrases=True, **options))
    assert bool(caplog.messages) == (options.get("texts") != "questions"), "skipped records are counted at every start"


def test_phrases_of_descriptions(settings, tmp_path):
    """The box of the region without region graphs; with them, other words have no phrases."""
    dataset = opened(settings, phrases=True)
    first, *_, last = [text.phrases for texts in dataset.groups for text in dataset.sample(texts).texts]
    assert first.spans == ((0, 9),) and first.boxes[0].tolist() == [[5, 6, 75, 86]] and last is None

    def named(number: int, phrase: str) -> dict:
        word = phrase.split()[0]
        return region(number, phrase, [entity(0, len(word), word)], [MAN | {"name": word}])

    settings = with_files(settings, region_graphs="graphs.json")
    regions = [named(11, "phrase  11"), named(12, "sentence 12")], [named(51, "red hat ")]
    graphs = [{"image_id": n, "regions": own} for n, own in zip((1, 5), regions, strict=True)]
    write_json(tmp_path / "graphs.json", graphs)
    dataset = opened(settings, phrases=True)
    phrases = [text.phrases for texts in dataset.groups for text in dataset.sample(texts).texts]
    assert [None if one is None else one.spans for one in phrases] == [((0, 6),), None, ((0, 3),)]
    damaged = named(11, "a") | {"objects": [{"object_id": 1}]}
    for regions, part in (([named(11, "a"), named(12, "b")], "same release"), ([damaged], "objects[0]")):
        write_json(tmp_path / "graphs.json", [{"image_id": 1, "regions": regions}])
        with refused("graphs.json", part):
            opened(settings, phrases=True)
