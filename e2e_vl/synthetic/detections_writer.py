"""Writer of a detections file as MAttNet published them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from e2e_vl.synthetic.format_writer import FormatWriter
from e2e_vl.synthetic.scene_records import SceneRecord


class MAttNetDetectionsWriter(FormatWriter[None]):
    """Writes ``refcoco+_unc/res101_coco_minus_refer_notime_dets.json``.

    It is the flat list of the detections of all splits, in a random order of images and boxes as in the release. A
    written width is ``x2 - x1 + 1`` with the inclusive corners of the release, which is the width between the pixels'
    edges.
    """

    def write(self, folder: Path, scenes: Sequence[SceneRecord[None]]) -> None:
        flat = [{**detection, "image_id": scene.image_id} for scene in scenes for detection in scene.detections]
        order = self.recipe.generator(0).permutation(len(flat))
        numbered = [{**flat[row], "det_id": number, "h5_id": number} for number, row in enumerate(order)]
        path = folder / "refcoco+_unc" / "res101_coco_minus_refer_notime_dets.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(numbered, separators=(",", ":")), encoding="utf-8")
