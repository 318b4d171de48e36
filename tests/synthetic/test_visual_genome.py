"""The files of Visual Genome, and as the reader gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from e2e_vl.config import DataConfig
from e2e_vl.data.visual_genome import VisualGenomeDataset
from tests.data.helpers import open_dataset

FILES = {
    "images": "visual_genome",
    "image_data": "visual_genome/image_data_{split}.json",
    "regions": "visual_genome/region_descriptions_{split}.json",
    "region_graphs": "visual_genome/region_graphs_{split}.json",
}


def read(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "visual_genome" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def regions(synthetic_folder) -> list[dict]:
    return [one for graph in read(synthetic_folder, "region_graphs_train") for one in graph["regions"]]


def test_nouns_are_where_the_graphs_say(synthetic_folder, regions, coco):
    words = set()
    for region in regions:
        for one in region["synsets"]:
            noun = region["phrase"][one["entity_idx_start"] : one["entity_idx_end"]]
            assert noun == one["entity_name"] and one["synset_name"] == f"{noun}.n.01"
            assert any(one["synset_name"] in thing["synsets"] for thing in region["objects"])
            words.add(noun)
        for thing in region["objects"]:
            assert [thing[side] for side in "xywh"] == coco.anns[thing["object_id"]]["bbox"]
            assert coco.anns[thing["object_id"]]["image_id"] == region["image_id"]
            assert region["x"] <= thing["x"] and thing["x"] + thing["w"] <= region["x"] + region["width"]
        ids = {thing["object_id"] for thing in region["objects"]}
        assert all({link["subject_id"], link["object_id"]} <= ids for link in region["relationships"])
        assert len(region["relationships"]) == len(ids) - 1
    assert {"star", "circle"} < words
    for image in read(synthetic_folder, "image_data_val"):
        file = synthetic_folder / "visual_genome" / "VG_100K" / f"{image['image_id']}.jpg"
        assert Image.open(file).size == (image["width"], image["height"])


def test_the_nouns_as_the_reader_gives_them(synthetic_folder, regions):
    """The first noun names the object that is meant; the description alone names its region."""
    without = {key: name for key, name in FILES.items() if key != "region_graphs"}
    settings = (DataConfig(name="visual_genome", root=str(synthetic_folder), files=own) for own in (FILES, without))
    dataset, plain = (open_dataset(VisualGenomeDataset, one, "train", "online", phrases=True) for one in settings)
    graphs = {one["region_id"]: one for one in regions}
    several = 0
    for texts in dataset.groups:
        sample = dataset.sample(texts)
        assert sample.images[0].locate().is_file()
        for text, whole in zip(sample.texts, plain.sample(texts).texts, strict=True):
            graph = graphs[text.metadata["region_id"]]
            thing = graph["objects"][0]
            meant = [thing["x"], thing["y"], thing["x"] + thing["w"], thing["y"] + thing["h"]]
            assert meant in text.phrases.boxes[0].tolist()
            several += len(text.phrases.spans) > 1
            assert whole.phrases.spans == ((0, len(text.words)),)
            x, y = graph["x"], graph["y"]
            assert whole.phrases.boxes[0].tolist() == [[x, y, x + graph["width"], y + graph["height"]]]
    assert several
