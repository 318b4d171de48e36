"""The written Flickr30K Entities files: boxes are those of the objects that phrases describe, counted from 1."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

SPLITS = ("train", "val", "testA", "testB")
PHRASE = re.compile(r"\[/EN#(\d+)/(\w+) ([^\]]*)\]")
NUMBERS = ("zero", "one", "two", "three", "four")


@pytest.fixture(scope="module")
def folder(synthetic_folder) -> Path:
    return synthetic_folder / "flickr30k"


def boxes_of(path: Path) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for element in ElementTree.parse(path).iter("object"):
        box = element.find("bndbox")
        for name in element.findall("name"):
            own = found.setdefault(name.text, [])
            if box is not None:
                own.append(tuple(int(box.find(side).text) for side in ("xmin", "ymin", "xmax", "ymax")))
    return found


def test_phrases_name_the_objects_that_they_describe(folder, coco):
    names = [entry["name"] for entry in coco.dataset["attributes"]]
    shapes = {entry["id"]: entry["name"] for entry in coco.dataset["categories"]}
    kinds, sizes = set(), set()
    for split in SPLITS:
        for image_id in map(int, (folder / f"{split}.txt").read_text().split()):
            chains = boxes_of(folder / "Annotations" / f"{image_id}.xml")
            objects = [
                ({shapes[one["category_id"]], *(names[n] for n in one["attribute_ids"])}, one["bbox"])
                for one in coco.imgToAnns[image_id]
            ]
            for chain, kind, text in PHRASE.findall((folder / "Sentences" / f"{image_id}.txt").read_text()):
                kinds.add(kind)
                if kind in ("scene", "notvisual"):
                    assert not chains.get(chain) and (chain == "0") == (kind == "notvisual")
                    continue
                first, *words = text.lower().split()
                singular = re.compile(r"^(circle|square|triangle|star|cross|diamond)(s|es)$")
                wanted = {singular.sub(r"\1", word) for word in words} - {"thing", "things"}
                meant = [box for is_true, box in objects if wanted <= is_true]
                assert len(meant) == (1 if first == "the" else NUMBERS.index(first)), text
                boxes = [(x + 1, y + 1, x + w, y + h) for x, y, w, h in meant]
                assert sorted(chains[chain]) == sorted(boxes), text
                sizes.add(len(boxes))
    assert {"people", "animals", "other", "scene", "notvisual"} <= kinds and {1, 2, 3} <= sizes


def test_layout(folder):
    lines = [line for path in (folder / "Sentences").glob("*.txt") for line in path.read_text().splitlines()]
    assert len(lines) == 5 * 150 and all(line.endswith(" .") for line in lines)
    assert len({len(PHRASE.findall(line)) for line in lines}) > 2
    every = [name for split in SPLITS for name in (folder / f"{split}.txt").read_text().split()]
    assert len(set(every)) == len(every) == 150
