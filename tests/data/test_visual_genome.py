"""What the reader of Visual Genome states: texts, answers, where images are, which of them COCO has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data.base import open_options
from e2e_vl.data.visual_genome import VisualGenomeDataset
from e2e_vl.samples import CorrectAnswer
from tests.data.roads import open_dataset

IMAGES = [
    {"image_id": 1, "width": 30, "height": 20, "url": "https://host/VG_100K_2/1.jpg", "coco_id": None},
    {"image_id": 5, "width": 40, "height": 10, "url": "https://host/VG_100K/5.jpg", "coco_id": 99},
    {"image_id": 6, "width": 40, "height": 10, "url": "https://host/VG_100K/6.jpg", "coco_id": None},
]
REGIONS = [
    {"id": 1, "regions": [{"region_id": n, "phrase": f"phrase {n}", "x": 0, "y": 0} for n in (11, 12)]},
    {"id": 5, "regions": [{"region_id": 51, "phrase": "red hat"}]},
    {"id": 6, "regions": []},
]
QUESTIONS = [
    {"id": 5, "qas": [{"qa_id": 501, "question": "What color?", "answer": "Red."}]},
    {"id": 1, "qas": [{"qa_id": 101, "question": "Who?", "answer": "A man."}]},
]


@pytest.fixture
def settings(tmp_path: Path) -> DataSettings:
    files = {}
    for key, name, content in (
        ("image_data", "image_data", IMAGES),
        ("regions", "region_descriptions", REGIONS),
        ("questions", "question_answers", QUESTIONS),
    ):
        files[key] = f"{name}.json"
        (tmp_path / files[key]).write_text(json.dumps(content), encoding="utf-8")
    return DataSettings(name="genome", root=str(tmp_path), files=files | {"images": "images"})


def opened(settings: DataSettings, **options) -> VisualGenomeDataset:
    own = DataSettings(name=settings.name, root=settings.root, files=settings.files, config=options)
    return open_dataset(VisualGenomeDataset, own, "all")


def test_regions_are_captions(settings, tmp_path):
    dataset = opened(settings)
    assert [dataset[number] for number in range(len(dataset))] == ["phrase 11", "phrase 12", "red hat"]
    assert list(dataset.image_ids()) == ["1", "5"] and list(dataset.truths()) == [None] * 3
    sample = dataset.sample(dataset.groups[0])
    [image] = sample.images
    assert (image.id, image.size) == ("1", (20, 30))
    assert image.locate() == tmp_path / "images" / "VG_100K_2" / "1.jpg"
    assert sample.texts[1].metadata == {"region_id": 12, "sent": "phrase 12"}
    assert sample.pool is dataset and list(sample.own_texts) == [0, 1]
    [image] = opened(settings, use_folders=False).sample([2]).images
    assert image.locate() == tmp_path / "images" / "5.jpg"


def test_questions_have_one_answer(settings):
    dataset = opened(settings, texts="questions")
    assert [dataset[0], dataset[1]] == ["What color?", "Who?"]
    assert list(dataset.truths()) == [CorrectAnswer("Red."), CorrectAnswer("A man.")]
    assert dataset.sample([1]).texts[0].metadata == {"qa_id": 101, "sent": "Who?"}
    own = dataclasses.replace(settings, config={"texts": "questions"})
    found = VisualGenomeDataset.answers_of(*open_options(VisualGenomeDataset, own), "all")
    assert found == {501: "Red.", 101: "A man."}


def test_descriptions_of_the_region_graphs_are_compared_when_the_files_are_read(settings, caplog):
    def graph(number: int, words: str) -> dict:
        word = {"entity_idx_start": 0, "entity_idx_end": len(words.split()[0]), "entity_name": words.split()[0]}
        named = {"x": 1, "y": 2, "w": 3, "h": 4, "name": words.split()[0]}
        return {"region_id": number, "phrase": words, "synsets": [word], "objects": [named]}

    with_graphs = dataclasses.replace(settings, files=settings.files | {"region_graphs": "graphs.json"})
    path = Path(settings.root) / "graphs.json"
    regions = [graph(11, "phrase  11"), graph(12, "sentence 12")], [graph(51, "red hat ")]
    path.write_text(json.dumps([{"image_id": n, "regions": own} for n, own in zip((1, 5), regions, strict=True)]))
    dataset = open_dataset(VisualGenomeDataset, with_graphs, "all", phrases=True)
    assert "graphs.json: 1 of 3 regions, region 12 the first of them, have other descriptions" in caplog.text
    phrases = [text.phrases for texts in dataset.groups for text in dataset.sample(texts).texts]
    assert [None if one is None else one.spans for one in phrases] == [((0, 6),), None, ((0, 3),)]
    path.write_text(json.dumps([{"image_id": 1, "regions": [graph(11, "a"), graph(12, "b")]}]))
    with pytest.raises(ValueError, match=r"graphs\.json: 2 of 2 regions, region 11 .* use files of the same release"):
        open_dataset(VisualGenomeDataset, with_graphs, "all", phrases=True)


def test_images_that_coco_has(settings):
    assert list(opened(settings, coco="without").image_ids()) == ["1"]
    assert list(opened(settings, coco="only", texts="questions").image_ids()) == ["5"]


def test_damaged_files(settings):
    path = Path(settings.root) / "image_data.json"
    path.write_text(json.dumps(IMAGES[:1]), encoding="utf-8")
    with pytest.raises(ValueError, match="image 5 is not among the images of image_data"):
        opened(settings)
    with pytest.raises(ValueError, match=r"data\.config\.coco is 'some'"):
        opened(settings, coco="some")
    path.write_text(json.dumps([*IMAGES, IMAGES[0]]), encoding="utf-8")
    with pytest.raises(ValueError, match="image 1 is listed twice"):
        opened(settings)
    (Path(settings.root) / "region_descriptions.json").write_text('[{"id": 1, "regions": [{"region_id": 3}]}]')
    with pytest.raises(ValueError, match="region 3 has no 'phrase'"):
        opened(settings)


def test_an_image_says_what_its_photo_is_called(settings):
    dataset = opened(settings)
    names = [dataset.sample(texts).images[0].photo_aliases for texts in dataset.groups]
    assert names == [(("vg", "1"),), (("vg", "5"), ("coco", "99"))]
