"""Writers of texts whose phrases name objects: Flickr30K Entities, phrases of RefCOCO+, and Visual Genome.

Flickr30K Entities has captions with phrases in brackets, and an XML file of boxes per image.

A phrase names one object by what only it has, or all objects that something is true of, where the scene allows it in
words of which none is needless: there are other stars and other red things than "the red star". What is named again, in
whatever words, belongs to the same chain. Scenes and what cannot be seen have no box. The type of a phrase follows from
the shape that it names, so that all types of the release occur; it means nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
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
    Description,
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
        start = len(words)
        if is_phrase:
            previous = words[-1].form if words else ""
            *modifiers, noun = text.split()
            noun_row = start + len(modifiers)
            for word in modifiers:
                kind, relation = _KINDS.get(word.lower(), ("ADJ", "amod"))
                words.append(GoldWord(word, kind, relation, noun_row))
            if previous == "in":
                words.append(GoldWord(noun, "NOUN", "pobj", start - 1))
            elif previous == "while":  # "while it is still": still governs, two words behind the pronoun
                words.append(GoldWord(noun, "PRON", "nsubj", noun_row + 2))
            elif root < 0:
                words.append(GoldWord(noun, "NOUN", "root", -1))
                root = noun_row
            else:
                words.append(GoldWord(noun, "NOUN", "conj", root))
        elif text == "while":
            words.append(GoldWord(text, "SCONJ", "mark", start + 3))
        elif text == "is still":
            words.append(GoldWord("is", "AUX", "cop", start + 1))
            words.append(GoldWord("still", "ADJ", "advcl", root))
        else:
            kind, relation = _KINDS[text]
            words.append(GoldWord(text, kind, relation, root))
    return words


def format_conllu(name: str, words: Sequence[GoldWord]) -> str:
    """Format one sentence for a CoNLL-U file, with the empty line after it."""
    lines = [f"# sent_id = {name}", f"# text = {' '.join(word.form for word in words)}"]
    for row, word in enumerate(words, start=1):
        cells = (row, word.form, "_", word.kind, "_", "_", word.governor + 1, word.relation, "_", "_")
        lines.append("\t".join(map(str, cells)))
    return "\n".join(lines) + "\n\n"


CAPTIONS = 5  # of a scene
_SHAPE_TYPES = ("people", "clothing", "bodyparts", "animals", "vehicles", "instruments")
_TYPES = dict(zip(SHAPES, _SHAPE_TYPES, strict=True))  # of phrases that name a shape; others are "other"
_SEVERAL = 4  # most objects of one phrase
_GROUPED = (("shape",), ("colour",), ("colour", "shape"), ("texture", "shape"))
_ATTEMPTS = 20
_SCENE = "scene"
_UNSEEN = "notvisual"


class DrawnPhrase(NamedTuple):
    """A phrase of a caption."""

    words: str
    kind: str  # its type
    objects: tuple[int, ...]  # indices of the named objects

    @property
    def chain_key(self) -> tuple[str, tuple[int, ...]]:
        """What all phrases of its coreference chain share: the objects, or the kind without objects."""
        if self.objects:
            return "", self.objects
        return self.kind, ()


EntityCaption = list[str | DrawnPhrase]
_Chains = dict[tuple[str, tuple[int, ...]], str]  # chain key -> number of the chain


def drawn_phrases(captions: Iterable[EntityCaption]) -> Iterator[DrawnPhrase]:
    """Yield the phrases of captions."""
    for caption in captions:
        for part in caption:
            if isinstance(part, DrawnPhrase):
                yield part


def _words(part: str | DrawnPhrase) -> str:
    return part.words if isinstance(part, DrawnPhrase) else part


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
        for split, split_scenes in by_split(scenes).items():
            for scene in split_scenes:
                chains = _chains(scene)
                lines = "".join(_line(caption, chains) + "\n" for caption in scene.drawn)
                (folder / "Sentences" / f"{scene.image_id}.txt").write_text(lines, encoding="utf-8")
                (folder / "Annotations" / f"{scene.image_id}.xml").write_text(_xml(scene, chains), encoding="utf-8")
            ids = "".join(f"{scene.image_id}\n" for scene in split_scenes)
            (folder / f"{split}.txt").write_text(ids, encoding="utf-8")
            self.write_parses(folder, split, split_scenes)

    def write_parses(self, folder: Path, split: str, scenes: Sequence[SceneRecord]) -> None:
        """Write the parses of a split; a text of several images has one parse."""
        parses: dict[str, str] = {}  # by text
        for scene in scenes:
            for line, caption in enumerate(scene.drawn):
                words = parse_caption([(_words(part), isinstance(part, DrawnPhrase)) for part in caption])
                text = " ".join(word.form for word in words)
                parses.setdefault(text, format_conllu(f"{scene.image_id}#{line}", words))
        (folder / "parses").mkdir(exist_ok=True)
        (folder / "parses" / f"{split}.conllu").write_text("".join(parses.values()), encoding="utf-8")


def draw_entity_captions(graph: SceneGraph, values: Values, rng: np.random.Generator) -> list[EntityCaption]:
    """Draw up to five different captions, each a list of words and phrases; all of them are true of the scene."""
    captions: dict[str, EntityCaption] = {}  # by text
    for _ in range(CAPTIONS * _ATTEMPTS):
        if len(captions) == CAPTIONS:
            break
        caption = _draw_caption(graph, values, rng)
        text = " ".join(_words(part) for part in caption)
        captions.setdefault(text, caption)
    return list(captions.values())


def _draw_caption(graph: SceneGraph, values: Values, rng: np.random.Generator) -> EntityCaption:
    """Join one to three phrases by "and" and commas, perhaps with a scene and something unseen, and a full stop."""
    phrases: dict[tuple[int, ...], DrawnPhrase] = {}  # by the named objects
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.65:
            phrase = _name_single(graph, rng)
        else:
            phrase = _name_group(graph, values, rng)
        if phrase is not None:
            phrases.setdefault(phrase.objects, phrase)
    parts: EntityCaption = []
    for number, phrase in enumerate(phrases.values(), start=1):
        if number > 1:
            parts.append("and" if number == len(phrases) else ",")
        parts.append(phrase)
    if rng.random() < 0.4 or not parts:
        if parts:
            parts.append("in")
        parts.append(DrawnPhrase("a picture", _SCENE, ()))
    if rng.random() < 0.2:
        parts += ["while", DrawnPhrase("it", _UNSEEN, ()), "is still"]
    first = parts[0]
    parts[0] = first._replace(words=first.words[0].upper() + first.words[1:])
    return [*parts, "."]


def _name_single(graph: SceneGraph, rng: np.random.Generator) -> DrawnPhrase | None:
    """Name an object by what only it has, if possible by a noun and adjectives of which neither is enough."""
    identified = identify(graph, SLOTS, rng, lambda description: _needs_all_words(description, graph))
    if identified is None:
        identified = identify(graph, SLOTS, rng)
    if identified is None:
        return None
    index, description = identified
    return DrawnPhrase(f"the {noun_phrase(description)}", _TYPES.get(description.shape, "other"), (index,))


def _name_group(graph: SceneGraph, values: Values, rng: np.random.Generator) -> DrawnPhrase | None:
    """Name all objects that something is true of, a few at most, if possible as `_name_single` does."""
    options = []
    for slots in _GROUPED:
        for description in _group_descriptions(graph, slots, values):
            if _needs_all_words(description, graph):
                options.append(description)
    if not options:
        slots = _GROUPED[rng.integers(len(_GROUPED))]
        options = _group_descriptions(graph, slots, values)
    if not options:
        return None
    description = options[rng.integers(len(options))]
    objects = members(description.mask(graph))
    words = f"{NUMBERS[len(objects)]} {noun_phrase(description, plural=True)}"
    return DrawnPhrase(words, _TYPES.get(description.shape, "other"), tuple(objects))


def _group_descriptions(graph: SceneGraph, slots: Sequence[str], values: Values) -> list[Description]:
    """Return the descriptions by these attributes that are true of a few objects."""
    descriptions = []
    for description in all_descriptions(slots, values):
        if 2 <= description.mask(graph).bit_count() <= _SEVERAL:
            descriptions.append(description)
    return descriptions


def _needs_all_words(description: Description, graph: SceneGraph) -> bool:
    """Return whether its noun alone, and its adjectives alone, are true of more objects than the description."""
    noun = Description(shape=description.shape)
    adjectives = replace(description, shape=None)
    num_described = description.mask(graph).bit_count()
    fewest = min(noun.mask(graph).bit_count(), adjectives.mask(graph).bit_count())
    return description.shape is not None and fewest > num_described


def _chains(scene: SceneRecord) -> _Chains:
    """Number the chains of sets of objects and of the scene; things that cannot be seen are 0."""
    chains: _Chains = {}
    for phrase in drawn_phrases(scene.drawn):
        number = "0" if phrase.kind == _UNSEEN else str(scene.image_id * 100 + len(chains) + 1)
        chains.setdefault(phrase.chain_key, number)
    return chains


def _line(caption: EntityCaption, chains: _Chains) -> str:
    """Return a line of a file of sentences, with its phrases in brackets."""
    texts = []
    for part in caption:
        if isinstance(part, DrawnPhrase):
            texts.append(f"[/EN#{chains[part.chain_key]}/{part.kind} {part.words}]")
        else:
            texts.append(part)
    return " ".join(texts)


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
        numbers = [number for (_, objects), number in chains.items() if index in objects]
        if not numbers:
            continue
        element = ElementTree.SubElement(root, "object")
        for number in numbers:
            ElementTree.SubElement(element, "name").text = number
        box = ElementTree.SubElement(element, "bndbox")
        x, y, w, h = (int(value) for value in item.box)
        for side, value in (("xmin", x + 1), ("ymin", y + 1), ("xmax", x + w), ("ymax", y + h)):
            ElementTree.SubElement(box, side).text = str(value)
    for (kind, _), number in chains.items():
        if kind == _SCENE:
            element = ElementTree.SubElement(root, "object")
            for name, text in (("name", number), ("scene", "1"), ("nobndbox", "0")):
                ElementTree.SubElement(element, name).text = text
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


class PhrasesWriter(EntitiesWriter):
    """Writes the noun phrases of expressions in the format of `EntitiesWriter`."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[EntityCaption]:
        references = [*scene.references, *scene.without_target]
        return [phrases_of_reference(reference, graph) for reference in references]

    @override
    def write_parses(self, folder: Path, split: str, scenes: Sequence[SceneRecord]) -> None:
        """Write nothing: expressions have no gold parses."""


def phrases_of_reference(reference: Reference, graph: SceneGraph) -> EntityCaption:
    """Split an expression into phrases and the words between them."""
    expression = reference.expression
    head, link, rest = split_phrases(expression, reference.sentence)
    target = () if reference.target is None else (reference.target,)
    if not rest:
        return [DrawnPhrase(head, "other", target)]
    fitting = members(expression.description.mask(graph))
    if expression.anchor is None:  # it is compared with all others that fit
        compared = [index for index in fitting if index not in target]
    else:
        compared = members(expression.anchor.mask(graph))
    return [DrawnPhrase(head, "other", tuple(fitting)), link, DrawnPhrase(rest, "other", tuple(compared))]


# Visual Genome: images, descriptions of regions, and graphs that link nouns with objects.
#
# A description is a referring expression. Its region contains the object that it refers to and what this is compared or
# related to. As in the release, a noun is linked with objects by its synset only: of two stars in one description each
# noun names both. Nouns such as "thing" have a synset of their own, with which the object is named in that region.

_FOLDER = "VG_100K"
_NOUNS = frozenset({*SHAPES, *THINGS})
_DESCRIPTION_KEYS = ("region_id", "image_id", "phrase", "x", "y", "width", "height")


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
        for split, split_scenes in by_split(scenes).items():
            images = []
            descriptions = []
            graphs = []
            for scene in split_scenes:
                link_image(scene.image_file, folder / _FOLDER / f"{scene.image_id}.jpg")
                regions = []
                for number, (reference, caption) in enumerate(zip(scene.references, scene.drawn, strict=True), start=1):
                    regions.append(_region(scene.first_sentence_id + number, scene, reference, caption))
                described = [{key: region[key] for key in _DESCRIPTION_KEYS} for region in regions]
                images.append(_image_data(scene))
                descriptions.append({"id": scene.image_id, "regions": described})
                graphs.append({"image_id": scene.image_id, "regions": regions})
            write_compact(folder / f"image_data_{split}.json", images)
            write_compact(folder / f"region_graphs_{split}.json", graphs)
            write_compact(folder / f"region_descriptions_{split}.json", descriptions)


def _image_data(scene: SceneRecord) -> dict[str, Any]:
    height, width = scene.size
    return {
        "image_id": scene.image_id,
        "coco_id": None,
        "flickr_id": None,
        "width": width,
        "height": height,
        "url": f"https://drawn.example/{_FOLDER}/{scene.image_id}.jpg",
    }


def _region(region_id: int, scene: SceneRecord, reference: Reference, caption: EntityCaption) -> dict[str, Any]:
    """Return the region of an expression, around all objects that it names."""
    text = ""
    synsets: list[dict[str, Any]] = []
    objects: dict[int, dict[str, Any]] = {}  # by index; the target is the first
    for position, part in enumerate(caption):
        if position:
            text += " "
        if isinstance(part, DrawnPhrase):
            noun = next((word for word in part.words.split() if word in _NOUNS), None)
            if noun is not None:
                start = len(text) + f" {part.words} ".index(f" {noun} ")
                synset = {
                    "entity_idx_start": start,
                    "entity_idx_end": start + len(noun),
                    "entity_name": noun,
                    "synset_name": f"{noun}.n.01",
                }
                synsets.append(synset)
            # the first phrase is about one of the objects that it is true of
            named_objects = (reference.target,) if position == 0 else part.objects
            for index in named_objects:
                objects[index] = _region_object(scene, index, noun)
        text += _words(part)
    target, *others = objects.values()
    predicate = next((part for part in caption if isinstance(part, str)), "")
    relationships = [
        {
            "relationship_id": 1000 * region_id + row,
            "object_id": other["object_id"],
            "subject_id": target["object_id"],
            "predicate": predicate,
            "synsets": [],
        }
        for row, other in enumerate(others)
    ]
    x = min(item["x"] for item in objects.values())
    y = min(item["y"] for item in objects.values())
    right = max(item["x"] + item["w"] for item in objects.values())
    bottom = max(item["y"] + item["h"] for item in objects.values())
    return {
        "region_id": region_id,
        "image_id": scene.image_id,
        "phrase": text,
        "x": x,
        "y": y,
        "width": right - x,
        "height": bottom - y,
        "synsets": synsets,
        "objects": list(objects.values()),
        "relationships": relationships,
    }


def _region_object(scene: SceneRecord, index: int, noun: str | None) -> dict[str, Any]:
    """Return an object as a region's graph has it, named by a noun of the region or by its shape."""
    item = scene.objects[index]
    name = noun or item.appearance.shape
    x, y, w, h = (int(value) for value in item.box)
    return {
        "object_id": scene.first_annotation_id + index,
        "name": name,
        "synsets": [f"{name}.n.01"],
        "x": x,
        "y": y,
        "w": w,
        "h": h,
    }
