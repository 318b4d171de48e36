"""Writer of Visual Genome: images, descriptions of regions, and graphs that link nouns with objects.

A description is a referring expression. Its region contains the object that it refers to and what this is compared or
related to. As in the release, a noun is linked with objects by its synset only: of two stars in one description each
noun names both. Nouns such as "thing" have a synset of their own, with which the object is named in that region.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e_vl.synthetic.base import FormatWriter, SceneRecord, by_split, link_image, write_compact
from e2e_vl.synthetic.config import SHAPES
from e2e_vl.synthetic.flickr30k import EntityCaption, phrases_of_reference
from e2e_vl.synthetic.language import THINGS, Reference
from e2e_vl.synthetic.scenes import SceneGraph

_FOLDER = "VG_100K"
_NOUNS = frozenset({*SHAPES, *THINGS})


class VisualGenomeWriter(FormatWriter):
    """Writes `image_data_<split>.json`, `region_descriptions_<split>.json`, `region_graphs_<split>.json` and
    `VG_100K/<id>.jpg`; an id is the image's number."""

    def draw(self, scene: SceneRecord, graph: SceneGraph) -> list[EntityCaption]:
        return [phrases_of_reference(reference, graph) for reference in scene.references]

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
