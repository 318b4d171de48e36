"""Writer of the files of the official LXMERT code: sentences with labels, and detected regions with features."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from e2e_vl.synthetic.base import CATEGORIES, FormatWriter, SceneRecord, by_split
from e2e_vl.synthetic.nlvr2 import draw_set
from e2e_vl.synthetic.scenes import SceneGraph
from e2e_vl.synthetic.vqa import SOURCE, draw_vqa_questions, vqa_scores

REGIONS = 36  # of every image
FEATURE_DIM = 64
_NOISE = 0.3  # standard deviation of the noise in features
_JITTER = 0.05  # of a box, relative to its width and height


class LxmertWriter(FormatWriter):
    """Writes the files of LXMERT's official code.

    For every split these are the pre-training sentences `<split>.json`, the questions `<split>_vqa.json`, the pairs of
    images `<split>_nlvr2.json` and the features `<split>_obj36.tsv`; and for all of them the lists of answers
    `all_ans.json` and `trainval_label2ans.json`.
    """

    @override
    def draw(self, scene: SceneRecord, graph: SceneGraph) -> dict[str, Any]:
        rng = self.recipe.generator(scene.split, scene.number, "lxmert")
        questions = draw_vqa_questions(graph, self.recipe.scene, rng)
        return {"questions": questions, "row": _row(scene, rng)}

    @override
    def write(self, folder: Path, scenes: Sequence[SceneRecord]) -> None:
        answers: set[str] = set()
        for split, part in by_split(scenes).items():
            sentences = [
                {
                    "img_id": scene.image_file.stem,
                    "sentf": {"mscoco": scene.captions, SOURCE: [one["question"] for one in scene.drawn["questions"]]},
                    "labelf": {SOURCE: [vqa_scores(one["answers"]) for one in scene.drawn["questions"]]},
                }
                for scene in part
            ]
            questions = [question for scene in part for question in _questions(scene)]
            answers |= {answer for question in questions for answer in question["label"]}
            for name, content in (("", sentences), ("_vqa", questions), ("_nlvr2", self._pairs(split, part))):
                (folder / f"{split}{name}.json").write_text(json.dumps(content), encoding="utf-8")
            lines = (_line(scene) for scene in part)
            (folder / f"{split}_obj{REGIONS}.tsv").write_text("".join(lines), encoding="utf-8")
        listed = sorted(answers)
        table = [{"ans": answer, "dsets": [SOURCE]} for answer in listed]
        for name, content in (("all_ans", table), ("trainval_label2ans", listed)):
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")

    def _pairs(self, split: str, scenes: Sequence[SceneRecord]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number in range(max(len(scenes) // 2, 1)):
            rng = self.recipe.generator(split, number, "lxmert pairs")
            made = draw_set(scenes, self.recipe.scene.values, rng)
            for row, (pair, labels) in enumerate(zip(made[0], made[2], strict=True) if made else ()):
                for column, (sentence, label) in enumerate(zip(made[1], labels, strict=True)):
                    found.append(
                        {
                            "identifier": f"{split}-{number}-{row}-{column}",
                            **{f"img{side}": scene.image_file.stem for side, scene in enumerate(pair)},
                            "label": int(label),
                            "sent": sentence.words,
                            "uid": f"nlvr2_{split}_{len(found)}",
                        }
                    )
        return found


def _questions(scene: SceneRecord) -> list[dict[str, Any]]:
    return [
        {
            "question_id": scene.image_id * 1000 + number,
            "img_id": scene.image_file.stem,
            "sent": one["question"],
            "question_type": one["question_type"],
            "answer_type": one["answer_type"],
            "label": vqa_scores(one["answers"]),
        }
        for number, one in enumerate(scene.drawn["questions"])
    ]


def _row(scene: SceneRecord, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Make the regions by cycling through the objects and jittering their boxes."""
    shown = [scene.objects[number % len(scene.objects)] for number in range(REGIONS)]
    height, width = scene.size
    boxes = []
    for one in shown:
        x, y, w, h = one.box
        corners = np.array([x, y, x + w, y + h]) + rng.normal(0, _JITTER, 4) * (w, h, w, h)
        corners = np.clip(corners, 0, [width, height, width, height])
        boxes.append(corners if (corners[2:] - corners[:2]).min() >= 1 else [x, y, x + w, y + h])
    features = rng.normal(0, _NOISE, (REGIONS, FEATURE_DIM))
    for feature, one in zip(features, shown, strict=True):
        feature[[one.category_id - 1, *(len(CATEGORIES) + attribute for attribute in one.attribute_ids)]] += 1
    confidences = rng.uniform(0.3, 1.0, (2, REGIONS))
    return {
        "objects_id": np.array([one.category_id - 1 for one in shown], dtype=np.int64),
        "objects_conf": confidences[0].astype(np.float32),
        "attrs_id": np.array([one.attribute_ids[0] for one in shown], dtype=np.int64),
        "attrs_conf": confidences[1].astype(np.float32),
        "boxes": np.array(boxes, dtype=np.float32),
        "features": features.astype(np.float32),
    }


def _line(scene: SceneRecord) -> str:
    height, width = scene.size
    cells = [scene.image_file.stem, str(height), str(width)]
    row = {name: base64.b64encode(np.ascontiguousarray(one)).decode() for name, one in scene.drawn["row"].items()}
    cells += [row[name] for name in ("objects_id", "objects_conf", "attrs_id", "attrs_conf")]
    return "\t".join([*cells, str(REGIONS), row["boxes"], row["features"]]) + "\n"
