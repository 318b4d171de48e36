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
        for split, split_scenes in by_split(scenes).items():
            sentences = []
            questions = []
            lines = []
            for scene in split_scenes:
                sentences.append(_sentences(scene))
                questions += _questions(scene)
                lines.append(_line(scene))
            for question in questions:
                answers.update(question["label"])
            _write(folder / f"{split}.json", sentences)
            _write(folder / f"{split}_vqa.json", questions)
            _write(folder / f"{split}_nlvr2.json", self._pairs(split, split_scenes))
            (folder / f"{split}_obj{REGIONS}.tsv").write_text("".join(lines), encoding="utf-8")
        sorted_answers = sorted(answers)
        _write(folder / "all_ans.json", [{"ans": answer, "dsets": [SOURCE]} for answer in sorted_answers])
        _write(folder / "trainval_label2ans.json", sorted_answers)

    def _pairs(self, split: str, scenes: Sequence[SceneRecord]) -> list[dict[str, Any]]:
        """Draw sets of pairs and sentences as NLVR2's writer does, but other ones."""
        examples: list[dict[str, Any]] = []
        for set_number in range(max(len(scenes) // 2, 1)):  # at least one, so that the file is not empty
            rng = self.recipe.generator(split, set_number, "lxmert pairs")
            pair_set = draw_set(scenes, self.recipe.scene.values, rng)
            if pair_set is None:
                continue
            for pair_number, (pair, labels) in enumerate(zip(pair_set.pairs, pair_set.labels, strict=True)):
                left, right = pair
                for sentence_number, (sentence, label) in enumerate(zip(pair_set.sentences, labels, strict=True)):
                    example = {
                        "identifier": f"{split}-{set_number}-{pair_number}-{sentence_number}",
                        "img0": left.image_file.stem,
                        "img1": right.image_file.stem,
                        "label": int(label),
                        "sent": sentence.words,
                        "uid": f"nlvr2_{split}_{len(examples)}",
                    }
                    examples.append(example)
        return examples


def _write(path: Path, content: list[Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _sentences(scene: SceneRecord) -> dict[str, Any]:
    """Return the pre-training record of an image: its captions and questions, and the scored answers."""
    questions = scene.drawn["questions"]
    return {
        "img_id": scene.image_file.stem,
        "sentf": {"mscoco": scene.captions, SOURCE: [question["question"] for question in questions]},
        "labelf": {SOURCE: [vqa_scores(question["answers"]) for question in questions]},
    }


def _questions(scene: SceneRecord) -> list[dict[str, Any]]:
    """Return the questions of an image as VQA's file has them."""
    return [
        {
            "question_id": scene.image_id * 1000 + number,
            "img_id": scene.image_file.stem,
            "sent": question["question"],
            "question_type": question["question_type"],
            "answer_type": question["answer_type"],
            "label": vqa_scores(question["answers"]),
        }
        for number, question in enumerate(scene.drawn["questions"])
    ]


def _row(scene: SceneRecord, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Make the regions by cycling through the objects and jittering their boxes."""
    items = [scene.objects[number % len(scene.objects)] for number in range(REGIONS)]
    height, width = scene.size
    boxes = []
    for item in items:
        x, y, w, h = item.box
        corners = np.array([x, y, x + w, y + h])
        jittered = corners + rng.normal(0, _JITTER, 4) * (w, h, w, h)
        jittered = np.clip(jittered, 0, [width, height, width, height])
        is_too_small = (jittered[2:] - jittered[:2]).min() < 1
        boxes.append(corners if is_too_small else jittered)
    features = rng.normal(0, _NOISE, (REGIONS, FEATURE_DIM))
    for feature, item in zip(features, items, strict=True):
        feature[item.category_id - 1] += 1
        for attribute_id in item.attribute_ids:
            feature[len(CATEGORIES) + attribute_id] += 1
    class_scores, attribute_scores = rng.uniform(0.3, 1.0, (2, REGIONS))
    return {
        "objects_id": np.array([item.category_id - 1 for item in items], dtype=np.int64),
        "objects_conf": class_scores.astype(np.float32),
        "attrs_id": np.array([item.attribute_ids[0] for item in items], dtype=np.int64),
        "attrs_conf": attribute_scores.astype(np.float32),
        "boxes": np.array(boxes, dtype=np.float32),
        "features": features.astype(np.float32),
    }


def _line(scene: SceneRecord) -> str:
    """Return the line of a features file: tab-separated, arrays in base64."""
    height, width = scene.size
    cells = [scene.image_file.stem, str(height), str(width)]
    row = scene.drawn["row"]
    cells += [_base64(row[name]) for name in ("objects_id", "objects_conf", "attrs_id", "attrs_conf")]
    cells += [str(REGIONS), _base64(row["boxes"]), _base64(row["features"])]
    return "\t".join(cells) + "\n"


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values)).decode()
