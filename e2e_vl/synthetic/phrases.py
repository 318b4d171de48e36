"""Writers of texts whose phrases name objects: Flickr30K Entities, phrases of RefCOCO+, and Visual Genome.

Flickr30K Entities has captions with phrases in brackets, and an XML file of boxes per image.

A phrase names one object by what only it has, or all objects that something is true of; what is named again, in
whatever words, belongs to the same chain. Scenes and what cannot be seen have no box. The type of a phrase follows from
the shape that it names, so that all types of the release occur; it means nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split, link_image, write_compact
from e2e_vl.synthetic.config import SHAPES
from e2e_vl.synthetic.language import (
    NUMBERS,
    SLOTS,
    THINGS,
    Reference,
    Values,
    all_descriptions,
    identify,
    noun_phrase,
    split_phrases,
)
from e2e_vl.synthetic.scenes import SceneGraph, members

# Gold parses of drawn captions, with the labels of Stanford's dependencies, as in VisualBERT's ACL paper.

# word -> part of speech and relation; other words before a noun are adjectives
_KINDS = {
    **dict.fromkeys(("the", "a", "an"), ("DET", "det")),
    **dict.fromkeys(NUMBERS, ("NUM", "num")),
    **dict.fromkeys((",", "."), ("PUNCT", "punct")),
    "and": ("CCONJ", "cc"),
    "in": ("ADP", "prep"),
}


class GoldWord(NamedTuple):
    """A word of a parse."""

    form: str
    kind: str  # part of speech, of Universal Dependencies
    relation: str
    governor: int  # row from 0; -1: the root


def parse_caption(parts: Sequence[tuple[str, bool]]) -> list[GoldWord]:
    """Parse a drawn caption, given as pairs of a text and whether it is a phrase."""
    words: list[GoldWord] = []
    root = -1  # row of the noun of the first phrase
    for text, is_phrase in parts:
        start, before = len(words), words[-1].form if words else ""
        *others, last = text.split()
        if is_phrase:
            noun = start + len(others)
            words += [GoldWord(word, *_KINDS.get(word.lower(), ("ADJ", "amod")), noun) for word in others]
            if before == "in":
                words.append(GoldWord(last, "NOUN", "pobj", start - 1))
            elif before == "while":  # "while it is still": still governs, two words behind the pronoun
                words.append(GoldWord(last, "PRON", "nsubj", noun + 2))
            else:
                words.append(GoldWord(last, "NOUN", "root" if root < 0 else "conj", root))
                root = noun if root < 0 else root
        elif text == "while":
            words.append(GoldWord(text, "SCONJ", "mark", start + 3))
        elif text == "is still":
            words.append(GoldWord("is", "AUX", "cop", start + 1))
            words.append(GoldWord("still", "ADJ", "advcl", root))
        else:
            words.append(GoldWord(text, *_KINDS[text], root))
    return words


def format_conllu(name: str, words: Sequence[GoldWord]) -> str:
    """Format one sentence for a CoNLL-U file, with the empty line after it."""
    lines = [f"# sent_id = {name}", f"# text = {' '.join(word.form for word in words)}"]
    for row, word in enumerate(words, start=1):
        cells = (row, word.form, "_", word.kind, "_", "_", word.governor + 1, word.relation, "_", "_")
        lines.append("\t".join(map(str, cells)))
    return "\n".join(lines) + "\n\n"


CAPTIONS = 5
_TYPES = dict(
    zip(SHAPES, ("people", "clothing", "bodyparts", "animals", "vehicles", "instruments"), strict=True)
)  # of phrases that name a shape; others are "other"
_SEVERAL = 4  # most objects of one phrase
_GROUPED = (("shape",), ("colour",), ("colour", "shape"), ("texture", "shape"))
_ATTEMPTS = 20
_SCENE, _UNSEEN = "scene", "notvisual"


class DrawnPhrase(NamedTuple):
    """A phrase of a caption."""

    words: str
    kind: str  # its type
    objects: tuple[int, ...]  # indices of the named objects

    @property
    def named(self) -> tuple[str, tuple[int, ...]]:
        """Key of the coreference chain: the objects, or the kind without objects."""
        return "" if self.objects else self.kind, self.objects


EntityCaption = list[str | DrawnPhrase]
_Chains = dict[tuple[str, tuple[int, ...]], str]  # what is named -> its number


class EntitiesWriter(FormatWriter):
    """Writes `Sentences/<id>.txt`, `Annotations/<id>.xml` and `<split>.txt`; an id is the image's number.

    The release has no parses; `parses/<split>.conllu` has gold parses of all captions.
    """

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[EntityCaption]:
        rng = self.recipe.generator(scene.split, scene.number, "flickr30k")
        return draw_entity_captions(graph, self.recipe.scene.values, rng)

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for name in ("Sentences", "Annotations"):
            (folder / name).mkdir(exist_ok=True)
        for split, part in by_split(scenes).items():
            for scene in part:
                chains = _chains(scene)
                lines = "".join(_line(caption, chains) + "\n" for caption in scene.drawn)
                (folder / "Sentences" / f"{scene.image_id}.txt").write_text(lines, encoding="utf-8")
                (folder / "Annotations" / f"{scene.image_id}.xml").write_text(_xml(scene, chains), encoding="utf-8")
            ids = "".join(f"{scene.image_id}\n" for scene in part)
            (folder / f"{split}.txt").write_text(ids, encoding="utf-8")
            self.write_parses(folder, split, part)

    def write_parses(self, folder: Path, split: str, scenes: Sequence[SceneRecord]) -> None:
        """Write the parses of a split; a text of several images has one parse."""
        found: dict[str, str] = {}
        for scene in scenes:
            for line, caption in enumerate(scene.drawn):
                parts = [(part, False) if isinstance(part, str) else (part.words, True) for part in caption]
                words = parse_caption(parts)
                text = " ".join(word.form for word in words)
                found.setdefault(text, format_conllu(f"{scene.image_id}#{line}", words))
        (folder / "parses").mkdir(exist_ok=True)
        (folder / "parses" / f"{split}.conllu").write_text("".join(found.values()), encoding="utf-8")


def draw_entity_captions(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[EntityCaption]:
    """Up to five different captions, each a list of words and phrases; all of them are true of the scene."""
    found: dict[str, EntityCaption] = {}
    for _ in range(CAPTIONS * _ATTEMPTS):
        if len(found) == CAPTIONS:
            break
        caption = _caption(graph, values, rng)
        found.setdefault(" ".join(part if isinstance(part, str) else part[0] for part in caption), caption)
    return list(found.values())


def _caption(graph: SceneGraph, values: Values, rng: np.random.Generator) -> EntityCaption:
    """One to three phrases joined by "and" and commas, perhaps with a scene and something unseen, and a full stop."""
    named: dict[tuple[int, ...], DrawnPhrase] = {}
    for _ in range(int(rng.integers(1, 4))):
        phrase = (_single if rng.random() < 0.65 else _group)(graph, values, rng)
        if phrase is not None:
            named.setdefault(phrase[2], phrase)
    parts: EntityCaption = []
    for number, phrase in enumerate(named.values()):
        if number:
            parts.append("and" if number == len(named) - 1 else ",")
        parts.append(phrase)
    if rng.random() < 0.4 or not parts:
        parts += ["in", DrawnPhrase("a picture", _SCENE, ())] if parts else [DrawnPhrase("a picture", _SCENE, ())]
    if rng.random() < 0.2:
        parts += ["while", DrawnPhrase("it", _UNSEEN, ()), "is still"]
    first = parts[0]
    parts[0] = first._replace(words=first.words[0].upper() + first.words[1:])
    return [*parts, "."]


def _single(graph: SceneGraph, values: Values, rng: np.random.Generator) -> DrawnPhrase | None:
    found = identify(graph, SLOTS, rng)
    if found is None:
        return None
    index, description = found
    return DrawnPhrase(f"the {noun_phrase(description)}", _TYPES.get(description.shape, "other"), (index,))


def _group(graph: SceneGraph, values: Values, rng: np.random.Generator) -> DrawnPhrase | None:
    slots = _GROUPED[rng.integers(len(_GROUPED))]
    some = [
        (description, mask)
        for description in all_descriptions(slots, values)
        if 2 <= (mask := description.mask(graph)).bit_count() <= _SEVERAL
    ]
    if not some:
        return None
    description, mask = some[rng.integers(len(some))]
    words = f"{NUMBERS[mask.bit_count()]} {noun_phrase(description, plural=True)}"
    return DrawnPhrase(words, _TYPES.get(description.shape, "other"), tuple(members(mask)))


def _chains(scene: SceneRecord) -> _Chains:
    """Number the chains of sets of objects and of the scene; things that cannot be seen are 0."""
    chains: _Chains = {}
    for phrase in (part for caption in scene.drawn for part in caption if not isinstance(part, str)):
        number = "0" if phrase.kind == _UNSEEN else str(scene.image_id * 100 + len(chains) + 1)
        chains.setdefault(phrase.named, number)
    return chains


def _line(caption: EntityCaption, chains: _Chains) -> str:
    return " ".join(
        part if isinstance(part, str) else f"[/EN#{chains[part.named]}/{part.kind} {part.words}]" for part in caption
    )


def _xml(scene: SceneRecord, chains: _Chains) -> str:
    """Return the annotation file of a scene: an object per box with the chains that name it, and one per scene.

    Pixels are counted from 1, the last included.
    """
    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = f"{scene.image_id}.jpg"
    size = ElementTree.SubElement(root, "size")
    for name, value in (("width", scene.size[1]), ("height", scene.size[0]), ("depth", 3)):
        ElementTree.SubElement(size, name).text = str(value)
    for index, item in enumerate(scene.objects):
        names = [chain for (_, objects), chain in chains.items() if index in objects]
        if not names:
            continue
        element = ElementTree.SubElement(root, "object")
        for name in names:
            ElementTree.SubElement(element, "name").text = name
        box = ElementTree.SubElement(element, "bndbox")
        x, y, w, h = (int(value) for value in item.box)
        for side, value in (("xmin", x + 1), ("ymin", y + 1), ("xmax", x + w), ("ymax", y + h)):
            ElementTree.SubElement(box, side).text = str(value)
    for (kind, _), chain in chains.items():
        if kind == _SCENE:
            element = ElementTree.SubElement(root, "object")
            for name, text in (("name", chain), ("scene", "1"), ("nobndbox", "0")):
                ElementTree.SubElement(element, name).text = text
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


class PhrasesWriter(EntitiesWriter):
    """Writes the noun phrases of expressions in the format of `EntitiesWriter`."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[EntityCaption]:
        return [phrases_of_reference(one, graph) for one in [*scene.references, *scene.without_target]]

    @override
    def write_parses(self, folder: Path, split: str, scenes: Sequence[SceneRecord]) -> None:
        """Expressions have no gold parses."""


def phrases_of_reference(reference: Reference, graph: SceneGraph) -> EntityCaption:
    """Split an expression into phrases and the words between them."""
    expression, fitting = reference.expression, reference.expression.description.mask(graph)
    head, link, rest = split_phrases(expression, reference.sentence)
    if not rest:
        return [DrawnPhrase(head, "other", () if reference.target is None else (reference.target,))]
    own = 0 if reference.target is None else 1 << reference.target
    others = fitting & ~own if expression.anchor is None else expression.anchor.mask(graph)
    return [
        DrawnPhrase(head, "other", tuple(members(fitting))),
        link,
        DrawnPhrase(rest, "other", tuple(members(others))),
    ]


# Visual Genome: images, descriptions of regions, and graphs that link nouns with objects.
#
# A description is a referring expression. Its region contains the object that it refers to and what this is compared or
# related to. As in the release, a noun is linked with objects by its synset only: of two stars in one description each
# noun names both. Nouns such as "thing" have a synset of their own, with which the object is named in that region.

_FOLDER = "VG_100K"
_NOUNS = frozenset({*SHAPES, *THINGS})


class VisualGenomeWriter(FormatWriter):
    """Writes Visual Genome's region descriptions and graphs; an id is the image's number.

    The files are `image_data_<split>.json`, `region_descriptions_<split>.json`, `region_graphs_<split>.json` and
    `VG_100K/<id>.jpg`.
    """

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[EntityCaption]:
        return [phrases_of_reference(reference, graph) for reference in scene.references]

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        (folder / _FOLDER).mkdir(exist_ok=True)
        for split, part in by_split(scenes).items():
            graphs = []
            for scene in part:
                link_image(scene.image_file, folder / _FOLDER / f"{scene.image_id}.jpg")
                pairs = enumerate(zip(scene.references, scene.drawn, strict=True), scene.first_sentence_id + 1)
                own = [_region(number, scene, reference, caption) for number, (reference, caption) in pairs]
                graphs.append({"image_id": scene.image_id, "regions": own})
            images = [
                {
                    "image_id": scene.image_id,
                    "coco_id": None,
                    "flickr_id": None,
                    "width": scene.size[1],
                    "height": scene.size[0],
                    "url": f"https://drawn.example/{_FOLDER}/{scene.image_id}.jpg",
                }
                for scene in part
            ]
            keys = ("region_id", "image_id", "phrase", "x", "y", "width", "height")
            descriptions = [
                {"id": graph["image_id"], "regions": [{key: one[key] for key in keys} for one in graph["regions"]]}
                for graph in graphs
            ]
            write_compact(folder / f"image_data_{split}.json", images)
            write_compact(folder / f"region_graphs_{split}.json", graphs)
            write_compact(folder / f"region_descriptions_{split}.json", descriptions)


def _region(number: int, scene: SceneRecord, reference: Reference, caption: EntityCaption) -> dict[str, Any]:
    words, synsets, objects = "", [], {}
    for count, part in enumerate(caption):
        words += " " if words else ""
        if isinstance(part, str):
            words += part
            continue
        # the first phrase is about one of the objects that it is true of
        named = (reference.target,) if count == 0 else part.objects
        noun = next((word for word in part.words.split() if word in _NOUNS), None)
        if noun is not None:
            start = len(words) + f" {part.words} ".index(f" {noun} ")
            place = {"entity_idx_start": start, "entity_idx_end": start + len(noun)}
            synsets.append({**place, "entity_name": noun, "synset_name": f"{noun}.n.01"})
        for index in named:
            item = scene.objects[index]
            name = noun or item.appearance.shape
            names = {"name": name, "synsets": [f"{name}.n.01"]}
            place = dict(zip("xywh", map(int, item.box), strict=True))
            objects[index] = {"object_id": scene.first_annotation_id + index, **names, **place}
        words += part.words
    target, *others = objects.values()
    link = next((part for part in caption if isinstance(part, str)), "")
    start = {"subject_id": target["object_id"], "predicate": link, "synsets": []}
    relationships = [
        {"relationship_id": 1000 * number + row, "object_id": other["object_id"], **start}
        for row, other in enumerate(others)
    ]
    corners = [(one["x"], one["y"], one["x"] + one["w"], one["y"] + one["h"]) for one in objects.values()]
    x, y, right, bottom = (
        choose(values) for choose, values in zip((min, min, max, max), zip(*corners, strict=True), strict=True)
    )
    return {
        "region_id": number,
        "image_id": scene.image_id,
        "phrase": words,
        "x": x,
        "y": y,
        "width": right - x,
        "height": bottom - y,
        "synsets": synsets,
        "objects": list(objects.values()),
        "relationships": relationships,
    }
