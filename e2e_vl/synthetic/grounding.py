"""Writers of the formats of grounding pre-training: MDETR's JSON and ODVG's JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from e2e_vl.synthetic.base import (
    CATEGORIES,
    CATEGORY_IDS,
    FormatWriter,
    SceneRecord,
    by_split,
    link_image,
    write_compact,
)
from e2e_vl.synthetic.phrases import DrawnPhrase, EntityCaption, draw_entity_captions, phrases_of_reference
from e2e_vl.synthetic.scenes import SceneGraph

_SOURCES = ("coco", "vg")  # of MDETR's mixed file; scenes take turns


class DrawnTexts(NamedTuple):
    """The texts of a scene."""

    captions: list[EntityCaption]
    expressions: list[EntityCaption]  # of `SceneRecord.references`, then of `without_target`


class _Phrase(NamedTuple):
    """A phrase of a text."""

    span: tuple[int, int]  # first character, and last character + 1
    words: str
    objects: tuple[int, ...]


def _spell(parts: EntityCaption) -> tuple[str, list[_Phrase]]:
    """Return the words of a text, and its phrases."""
    text = ""
    phrases = []
    for part in parts:
        if text:
            text += " "
        words = part.words if isinstance(part, DrawnPhrase) else part
        if isinstance(part, DrawnPhrase):
            phrases.append(_Phrase((len(text), len(text) + len(words)), words, part.objects))
        text += words
    return text, phrases


def _word_spans(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return the span of each word between two characters."""
    spans = []
    position = start
    for word in text[start:end].split(" "):
        spans.append((position, position + len(word)))
        position += len(word) + 1
    return spans


def _corners(scene: SceneRecord, index: int) -> list[float]:
    """Return the box of an object as x1, y1, x2, y2."""
    x, y, width, height = scene.objects[index].box
    return [x, y, x + width, y + height]


class _GroundingWriter(FormatWriter):
    """Draws the same texts for both formats."""

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> DrawnTexts:
        rng = self.recipe.generator(scene.split, scene.number, "grounding")
        captions = draw_entity_captions(graph, self.recipe.scene.values, rng)
        references = [*scene.references, *scene.without_target]
        return DrawnTexts(captions, [phrases_of_reference(reference, graph) for reference in references])


# MDETR


class MDETRWriter(_GroundingWriter):
    """Writes the files of github.com/ashkamath/mdetr for each split.

    - `final_flickr_separateGT_<split>.json`: captions, an entry for each. As in the release, sides are strings.
    - `final_mixed_<split>.json`: the expressions of a scene, joined as sentences of one caption. The words of a phrase
      have spans of their own. Images are of two sources in turn: `images/train2014` and `vg/<id>.jpg`.
    - `finetune_refcoco+_<split>.json`: expressions; with `no_target` also `finetune_grefcoco_<split>.json`, with those
      without a target.
    """

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        (folder / "vg").mkdir(exist_ok=True)
        for split, split_scenes in by_split(scenes).items():
            captions = _MDETRFile()
            mixed = _MDETRFile()
            expressions = _MDETRFile()
            all_expressions = _MDETRFile()
            for scene in split_scenes:
                self._add_captions(captions, scene)
                self._add_mixed(mixed, scene, folder)
                self._add_expressions(expressions, scene, "refcoco+", len(scene.references))
                self._add_expressions(all_expressions, scene, "grefcoco", None)
            captions.write(folder / f"final_flickr_separateGT_{split}.json")
            mixed.write(folder / f"final_mixed_{split}.json")
            expressions.write(folder / f"finetune_refcoco+_{split}.json")
            if self.recipe.language.no_target:
                all_expressions.write(folder / f"finetune_grefcoco_{split}.json")

    def _add_captions(self, file: _MDETRFile, scene: SceneRecord) -> None:
        """Add the captions of a scene; a box has the spans of all phrases that name its object."""
        for sentence, parts in enumerate(scene.drawn.captions):
            text, phrases = _spell(parts)
            caption_id = file.add_caption(
                scene,
                text,
                dataset_name="flickr",
                height=str(scene.size[0]),
                width=str(scene.size[1]),
                original_img_id=scene.image_id,
                sentence_id=sentence,
                tokens_negative=[(0, len(text))],
                tokens_positive_eval=[[phrase.span] for phrase in phrases if phrase.objects],
            )
            spans_of: dict[int, list[tuple[int, int]]] = {}
            for phrase in phrases:
                for index in phrase.objects:
                    spans_of.setdefault(index, []).append(phrase.span)
            for index, spans in spans_of.items():
                file.add_box(caption_id, scene, index, spans)

    def _add_mixed(self, file: _MDETRFile, scene: SceneRecord, folder: Path) -> None:
        """Add all expressions about objects of a scene as one caption."""
        source = _SOURCES[scene.image_id % len(_SOURCES)]
        values: dict[str, Any] = {"data_source": source, "dataset_name": "mixed", "original_id": scene.image_id}
        if source == "vg":
            values["file_name"] = f"{scene.image_id}.jpg"
            link_image(scene.image_file, folder / "vg" / values["file_name"])
        text = ""
        targets: list[tuple[int, list[tuple[int, int]]]] = []
        expressions = scene.drawn.expressions[: len(scene.references)]  # others have no target
        for reference, parts in zip(scene.references, expressions, strict=True):
            sentence, phrases = _spell(parts)
            if text:
                text += " "
            start, end = phrases[0].span
            targets.append((reference.target, _word_spans(text + sentence, len(text) + start, len(text) + end)))
            text += f"{sentence}."
        caption_id = file.add_caption(scene, text, tokens_negative=[(0, len(text))], **values)
        for index, spans in targets:
            file.add_box(caption_id, scene, index, spans)

    def _add_expressions(self, file: _MDETRFile, scene: SceneRecord, name: str, count: int | None) -> None:
        """Add the first expressions of a scene, or all of them; the first phrase stands for the object."""
        references = [*scene.references, *scene.without_target]
        for reference, parts in zip(references[:count], scene.drawn.expressions[:count], strict=True):
            text, phrases = _spell(parts)
            caption_id = file.add_caption(
                scene, text, dataset_name=name, original_id=scene.image_id, tokens_negative=[]
            )
            spans = [phrases[0].span]
            if reference.target is None:
                file.add_no_box(caption_id, spans)
            else:
                file.add_box(caption_id, scene, reference.target, spans)


class _MDETRFile:
    """Collects the entries of a file."""

    def __init__(self) -> None:
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def add_caption(self, scene: SceneRecord, text: str, **values: Any) -> int:
        """Add a caption and return its id; `values` are further keys."""
        caption_id = len(self.images)
        image = {"file_name": scene.image_file.name, "height": scene.size[0], "width": scene.size[1]}
        self.images.append({**image, "id": caption_id, "caption": text, **values})
        return caption_id

    def add_box(self, caption_id: int, scene: SceneRecord, index: int, spans: list[tuple[int, int]]) -> None:
        """Add the box of an object that the spans of a caption name."""
        item = scene.objects[index]
        annotation = {
            "area": float(item.area),
            "iscrowd": 0,
            "image_id": caption_id,
            "category_id": item.category_id,
            "id": len(self.annotations),
            "bbox": item.box,
            "tokens_positive": spans,
            "original_id": scene.first_annotation_id + index,
        }
        self.annotations.append(annotation)

    def add_no_box(self, caption_id: int, spans: list[tuple[int, int]]) -> None:
        """Add that the spans of a caption name nothing, as gRefCOCO's files do."""
        annotation = {
            "area": -1,
            "iscrowd": -1,
            "image_id": caption_id,
            "category_id": -1,
            "id": len(self.annotations),
            "bbox": [0, 0, 0, 0],
            "empty": True,
            "original_id": -1,
            "tokens_positive": spans,
        }
        self.annotations.append(annotation)

    def write(self, path: Path) -> None:
        content = {
            "info": [],
            "licenses": [],
            "images": self.images,
            "annotations": self.annotations,
            "categories": CATEGORIES,
        }
        write_compact(path, content)


# ODVG


class ODVGWriter(_GroundingWriter):
    """Writes JSON lines for each split, and `label_map.json`, the names of the classes by number, from 0.

    - `<split>_vg.jsonl`: captions. Those with even numbers have the spans of their phrases, as in MMDetection's files,
      and one region for all boxes of a phrase; the others have neither, as in those of Open-GroundingDino.
    - `<split>_rec.jsonl`: expressions, a line for each scene.
    - `<split>_od.jsonl`: the objects of each scene.
    """

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        write_compact(folder / "label_map.json", {str(row): entry["name"] for row, entry in enumerate(CATEGORIES)})
        class_numbers = {category_id: row for row, category_id in enumerate(CATEGORY_IDS.values())}
        for split, split_scenes in by_split(scenes).items():
            captions = []
            expressions = []
            detections = []
            for scene in split_scenes:
                captions += _caption_lines(scene)
                expressions.append({**_odvg_image(scene), "referring": _referred_objects(scene)})
                instances = []
                for index, item in enumerate(scene.objects):
                    name = item.appearance.shape
                    label = class_numbers[item.category_id]
                    instances.append({"bbox": _corners(scene, index), "label": label, "category": name})
                detections.append({**_odvg_image(scene), "detection": {"instances": instances}})
            _write_lines(folder / f"{split}_vg.jsonl", captions)
            _write_lines(folder / f"{split}_rec.jsonl", expressions)
            _write_lines(folder / f"{split}_od.jsonl", detections)


def _odvg_image(scene: SceneRecord) -> dict[str, Any]:
    return {"filename": scene.image_file.name, "height": scene.size[0], "width": scene.size[1]}


def _caption_lines(scene: SceneRecord) -> list[dict[str, Any]]:
    """Return a line for each caption of a scene that names an object."""
    lines = []
    for number, parts in enumerate(scene.drawn.captions):
        text, phrases = _spell(parts)
        regions: list[dict[str, Any]] = []
        for phrase in phrases:
            boxes = [_corners(scene, index) for index in phrase.objects]
            if not boxes:
                continue
            if number % 2:
                regions += [{"bbox": box, "phrase": phrase.words} for box in boxes]
            else:
                bbox = boxes[0] if len(boxes) == 1 else boxes
                regions.append({"bbox": bbox, "phrase": phrase.words, "tokens_positive": [phrase.span]})
        if regions:
            lines.append({**_odvg_image(scene), "grounding": {"caption": text, "regions": regions}})
    return lines


def _referred_objects(scene: SceneRecord) -> list[dict[str, Any]]:
    """Return each object that is referred to, with its expressions."""
    expressions: dict[int, list[str]] = {}
    for reference in scene.references:
        expressions.setdefault(reference.target, []).append(reference.sentence)
    return [{"bbox": _corners(scene, index), "phrase": phrases} for index, phrases in expressions.items()]


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
