"""Writers of COCO's instances and captions files.

Annotations of an image are listed in the order of painting: of two that touch, the later one lies in front. Beside
COCO's keys, an annotation has `attribute_ids`, three indices (colour, texture, size) into the file's list
`attributes` of {id, name}.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from e2e_vl.synthetic.base import ATTRIBUTES, CATEGORIES, FormatWriter, SceneRecord, by_split, write_compact
from e2e_vl.synthetic.language import Reference


class COCOAnnotationsWriter(FormatWriter):
    """Writes `instances_train2014.json` and `captions_train2014.json`, both over all splits."""

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        write_instances(folder / "instances_train2014.json", scenes)
        _write_captions(folder / "captions_train2014.json", scenes)


class COCODetectionWriter(FormatWriter):
    """Writes `instances_<split>.json`."""

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, split_scenes in by_split(scenes).items():
            write_instances(folder / f"instances_{split}.json", split_scenes)


class COCOCaptionsWriter(FormatWriter):
    """Writes `captions_<split>.json`."""

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        for split, split_scenes in by_split(scenes).items():
            _write_captions(folder / f"captions_{split}.json", split_scenes)


def write_instances(path: Path, scenes: Sequence[SceneRecord]) -> None:
    """Write an instances file with the categories and attributes of `base.py`."""
    annotations = []
    for scene in scenes:
        for annotation_id, item in enumerate(scene.objects, start=scene.first_annotation_id):
            annotation = {
                "segmentation": item.outlines,
                "area": float(item.area),
                "iscrowd": 0,
                "image_id": scene.image_id,
                "bbox": item.box,
                "category_id": item.category_id,
                "id": annotation_id,
                "attribute_ids": item.attribute_ids,
            }
            annotations.append(annotation)
    _write(path, scenes, annotations, categories=CATEGORIES, attributes=ATTRIBUTES)


def _write_captions(path: Path, scenes: Sequence[SceneRecord]) -> None:
    annotations: list[dict[str, Any]] = []
    for scene in scenes:
        for caption in scene.captions:
            annotations.append({"image_id": scene.image_id, "id": len(annotations) + 1, "caption": caption})
    _write(path, scenes, annotations)


def _write(path: Path, scenes: Sequence[SceneRecord], annotations: list[dict[str, Any]], **lists: Any) -> None:
    info = {
        "description": "Drawn scenes in the layout of COCO 2014; not part of COCO.",
        "url": "",
        "version": "1.0",
        "year": 2014,
        "contributor": "e2e-vl",
        "date_created": "2014-01-01 00:00:00",
    }
    images = [
        {
            "license": 1,
            "file_name": scene.image_file.name,
            "coco_url": "",
            "height": scene.size[0],
            "width": scene.size[1],
            "date_captured": "2014-01-01 00:00:00",
            "flickr_url": "",
            "id": scene.image_id,
        }
        for scene in scenes
    ]
    content = {
        "info": info,
        "images": images,
        "licenses": [{"url": "http://www.apache.org/licenses/LICENSE-2.0", "id": 1, "name": "Apache-2.0"}],
        "annotations": annotations,
        **lists,
    }
    write_compact(path, content)


# Writer of RefCOCO+ in the layouts of REFER and gRefCOCO.


class RefCOCOPlusWriter(FormatWriter):
    """Writes `instances.json` (as in COCO) and the pickle `refs(unc).p`, both over all splits.

    With `no_target` also `grefs(unc).json` of gRefCOCO, with the same expressions and those without a target. A
    sentence's `family` is ours, the other keys are REFER's.
    """

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        write_instances(folder / "instances.json", scenes)
        refs: list[dict[str, Any]] = []
        for scene in scenes:
            refs += reference_entries(scene, len(refs))
        # A pickle also records which equal strings are one object, and that depends on the processes that made them.
        refs = json.loads(json.dumps(refs))
        (folder / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))  # the newest protocol that Python 2 reads
        if self.recipe.language.no_target:
            grefs = []
            for ref in refs:  # with lists, since an expression of gRefCOCO may be about several objects
                grefs.append({**ref, "ann_id": [ref["ann_id"]], "category_id": [ref["category_id"]]})
            for scene in scenes:
                grefs += _without_target(scene, len(grefs))
            write_compact(folder / "grefs(unc).json", grefs)


def reference_entries(scene: SceneRecord, first_ref_id: int) -> list[dict[str, Any]]:
    """Return REFER's entries of a scene, one per object that is referred to.

    As in the release, `file_name` has a number added and does not name a file.
    """
    sentences: dict[int, list[dict[str, Any]]] = {}  # by object
    for sentence_id, reference in enumerate(scene.references, start=scene.first_sentence_id):
        sentences.setdefault(reference.target, []).append(_sentence(sentence_id, reference))
    refs = []
    for ref_id, (target, target_sentences) in enumerate(sentences.items(), start=first_ref_id):
        annotation_id = scene.first_annotation_id + target
        ref = {
            "sent_ids": [sentence["sent_id"] for sentence in target_sentences],
            "file_name": f"{scene.image_file.stem}_{annotation_id}{scene.image_file.suffix}",
            "ann_id": annotation_id,
            "ref_id": ref_id,
            "image_id": scene.image_id,
            "split": scene.split,
            "sentences": target_sentences,
            "category_id": scene.objects[target].category_id,
        }
        refs.append(ref)
    return refs


def _without_target(scene: SceneRecord, first_ref_id: int) -> list[dict[str, Any]]:
    """Return gRefCOCO's entries of a scene, one per expression that refers to nothing."""
    refs = []
    first_sentence_id = scene.first_sentence_id + len(scene.references)
    for number, reference in enumerate(scene.without_target):
        sentence_id = first_sentence_id + number
        ref = {
            "sent_ids": [sentence_id],
            "file_name": scene.image_file.name,
            "ann_id": [-1],
            "ref_id": first_ref_id + number,
            "image_id": scene.image_id,
            "split": scene.split,
            "sentences": [_sentence(sentence_id, reference)],
            "category_id": [-1],
        }
        refs.append(ref)
    return refs


def _sentence(sentence_id: int, reference: Reference) -> dict[str, Any]:
    return {
        "tokens": reference.sentence.split(" "),
        "raw": reference.typed,
        "sent_id": sentence_id,
        "sent": reference.sentence,
        "family": reference.expression.subfamily,
    }


# Writer of a detections file as MAttNet published them.


class MAttNetDetectionsWriter(FormatWriter):
    """Writes `refcoco+_unc/res101_coco_minus_refer_notime_dets.json`.

    It is the flat list of the detections of all splits, in a random order of images and boxes as in the release. Widths
    are `x2 - x1 + 1` as in the release, whose corners are inclusive pixels; that is the continuous width of our boxes.
    """

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        detections = []
        for scene in scenes:
            detections += [{**detection, "image_id": scene.image_id} for detection in scene.detections]
        order = self.recipe.generator(0).permutation(len(detections))
        numbered = [{**detections[row], "det_id": number, "h5_id": number} for number, row in enumerate(order)]
        path = folder / "refcoco+_unc" / "res101_coco_minus_refer_notime_dets.json"
        path.parent.mkdir(exist_ok=True)
        write_compact(path, numbered)
