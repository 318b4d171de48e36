"""The files of Flickr30K Entities: boxes are those of the objects that phrases describe; gold parses of captions."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.synthetic.phrases import format_conllu, parse_caption
from tests.data.helpers import open_dataset
from tests.synthetic.meaning import LINKS, NUMBERS, SPLITS, described, words_of

PHRASE = re.compile(r"\[/EN#(\d+)/(\w+) ([^\]]*)\]")


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
    kinds, sizes = set(), set()
    for split in SPLITS:
        for image_id in map(int, (folder / f"{split}.txt").read_text().split()):
            chains = boxes_of(folder / "Annotations" / f"{image_id}.xml")
            objects = words_of(coco, image_id)
            for chain, kind, text in PHRASE.findall((folder / "Sentences" / f"{image_id}.txt").read_text()):
                kinds.add(kind)
                if kind in ("scene", "notvisual"):
                    assert not chains.get(chain) and (chain == "0") == (kind == "notvisual")
                    continue
                first, _, phrase = text.lower().partition(" ")
                meant = described(phrase, objects)
                assert len(meant) == (1 if first == "the" else NUMBERS[first]), text
                boxes = [
                    one["bbox"] for one, words in zip(coco.imgToAnns[image_id], objects, strict=True) if words in meant
                ]
                assert sorted(chains[chain]) == sorted((x + 1, y + 1, x + w, y + h) for x, y, w, h in boxes), text
                sizes.add(len(boxes))
    assert {"people", "animals", "other", "scene", "notvisual"} <= kinds and {1, 2, 3} <= sizes


# Parses

CAPTION = [
    *(("The big red star", True), (",", False), ("two blue things", True), ("and", False), ("the cross", True)),
    *(("in", False), ("a picture", True), ("while", False), ("it", True), ("is still", False), (".", False)),
]
PARSE = """
The det star|big amod star|red amod star|star root -|, punct star|two num things|blue amod things|things conj star
and cc star|the det cross|cross conj star|in prep star|a det picture|picture pobj in|while mark still
it nsubj still|is cop still|still advcl star|. punct star
"""


def test_the_parse_of_a_caption_with_everything():
    words = parse_caption(CAPTION)
    governors = ["-" if word.governor < 0 else words[word.governor].form for word in words]
    found = [f"{word.form} {word.relation} {governor}" for word, governor in zip(words, governors, strict=True)]
    assert found == PARSE.strip().replace("\n", "|").split("|")
    lines = format_conllu("7#0", parse_caption([("A picture", True), (".", False)])).split("\n")
    assert lines[:2] == ["# sent_id = 7#0", "# text = A picture ."] and lines[-2:] == ["", ""]
    assert lines[3] == "2\tpicture\t_\tNOUN\t_\t_\t0\troot\t_\t_"


def test_every_written_caption_has_one_parse(synthetic_folder, folder):
    for split in ("train", "val"):
        captions = set()
        for image in (folder / f"{split}.txt").read_text().split():
            for line in (folder / "Sentences" / f"{image}.txt").read_text().splitlines():
                captions.add(" ".join(PHRASE.sub(r"\3", line).split()))
        parsed = (folder / "parses" / f"{split}.conllu").read_text()
        texts = [line.removeprefix("# text = ") for line in parsed.splitlines() if line.startswith("# text = ")]
        assert len(texts) == len(set(texts)) and set(texts) == captions
        for sentence in parsed.strip().split("\n\n"):
            rows = [line.split("\t") for line in sentence.splitlines() if not line.startswith("#")]
            assert [row[6] for row in rows].count("0") == 1 and {len(row) for row in rows} == {10}
    assert not (synthetic_folder / "refcoco+_phrases" / "parses").exists()


# Phrases of expressions


def test_the_phrases_of_expressions_as_the_reader_gives_them(synthetic_folder):
    """The first phrase names the object that is meant, others like it too; the second one other objects."""
    files = {"images": "images/train2014", "refs": "refcoco+/refs(unc).p", "instances": "refcoco+/instances.json"}
    files |= {"phrases": "refcoco+_phrases/Sentences", "phrase_boxes": "refcoco+_phrases/Annotations"}
    settings = DataConfig(name="refcoco", root=str(synthetic_folder), files=files)
    dataset = open_dataset(RefCOCODataset, settings, "train", "gt", phrases=True)
    numbers = {"attribute": set(), "superlative": set(), "comparison": set(), "relation": set()}
    for texts in dataset.groups:
        for text in dataset.sample(texts).texts:
            phrases, meant = text.phrases, np.array(text.truth.boxes[0])
            assert phrases.is_complete
            numbers[text.metadata["family"].split("/")[0]].add(len(phrases.spans))
            named = [text.words[slice(*span)] for span in phrases.spans]
            assert named == [text.words] or re.split(rf"(?: that is)? (?:{'|'.join(LINKS)}) ", text.words) == named
            assert (phrases.boxes[0] == meant).all(axis=1).any(), text.words
            for boxes in phrases.boxes[1:]:
                assert len(boxes) and not (boxes == meant).all(axis=1).any(), text.words
            if text.metadata["family"].startswith("relation"):
                assert len(phrases.boxes[1]) == 1  # one landmark
    assert numbers == {"attribute": {1}, "superlative": {1}, "comparison": {2}, "relation": {2}}
    image_id = dataset.texts[0].image_id
    with pytest.raises(ValueError, match=f"{image_id}.txt.*'a fox'"):
        dataset.phrases.of(image_id, "a fox")
