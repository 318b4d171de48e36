"""Writer of RefCOCO+ in the layout of REFER."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e_vl.synthetic.coco_writer import write_instances
from e2e_vl.synthetic.format_writer import FormatWriter
from e2e_vl.synthetic.scene_records import SceneRecord


class RefCOCOPlusWriter(FormatWriter[None]):
    """Writes ``instances.json`` (see ``coco_writer``) and the pickle ``refs(unc).p``, both over all splits.

    A sentence's ``family`` is ours, the other keys are REFER's.
    """

    def write(self, folder: Path, scenes: Sequence[SceneRecord[None]]) -> None:
        write_instances(folder / "instances.json", scenes)
        refs: list[dict[str, Any]] = []
        for scene in scenes:
            refs += _refs(scene, len(refs))
        # A pickle also records which equal strings are one object, and that depends on the processes that made them.
        refs = json.loads(json.dumps(refs))
        (folder / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))  # the newest protocol that Python 2 reads


def _refs(scene: SceneRecord[None], first_ref_id: int) -> list[dict[str, Any]]:
    """One entry per object that is referred to.

    As in the release, ``file_name`` has a number added and does not name a file.
    """
    sentences: dict[int, list[dict[str, Any]]] = {}  # by object
    for sent_id, reference in enumerate(scene.references, start=scene.first_sentence_id):
        said = {"raw": reference.typed, "sent_id": sent_id, "sent": reference.sentence}
        entry = {"tokens": reference.sentence.split(" "), **said, "family": reference.expression.family}
        sentences.setdefault(reference.target, []).append(entry)
    return [
        {
            "sent_ids": [entry["sent_id"] for entry in entries],
            "file_name": f"{scene.image_file.stem}_{scene.first_annotation_id + target}{scene.image_file.suffix}",
            "ann_id": scene.first_annotation_id + target,
            "ref_id": ref_id,
            "image_id": scene.image_id,
            "split": scene.split,
            "sentences": entries,
            "category_id": scene.objects[target].category_id,
        }
        for ref_id, (target, entries) in enumerate(sentences.items(), start=first_ref_id)
    ]
