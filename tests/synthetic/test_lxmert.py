"""The files of the official LXMERT code: keys, regions, labels that fit the questions."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np

from e2e_vl.synthetic.lxmert import FEATURE_DIM, REGIONS


def read(folder: Path, name: str) -> list:
    return json.loads((folder / "lxmert" / f"{name}.json").read_text(encoding="utf-8"))


def test_sentences_and_questions_agree(synthetic_folder):
    answers = read(synthetic_folder, "trainval_label2ans")
    assert [row["ans"] for row in read(synthetic_folder, "all_ans")] == answers == sorted(set(answers))
    for split, count in (("train", 110), ("val", 20)):
        images = read(synthetic_folder, split)
        assert len(images) == count == len({image["img_id"] for image in images})
        asked = {}
        for image in images:
            file = synthetic_folder / "images/train2014" / f"{image['img_id']}.jpg"
            assert image["sentf"]["mscoco"] and file.is_file()
            pairs = zip(image["sentf"]["vqa"], image["labelf"]["vqa"], strict=True)
            asked |= {(image["img_id"], text): label for text, label in pairs}
        questions = read(synthetic_folder, f"{split}_vqa")
        assert {(one["img_id"], one["sent"]): one["label"] for one in questions} == asked
        assert len({one["question_id"] for one in questions}) == len(questions)
        for label in asked.values():
            assert set(label) <= set(answers) and set(label.values()) <= {0.3, 0.6, 0.9, 1.0}
            assert max(label.values()) >= 0.9


def test_pairs_name_images_with_features(synthetic_folder):
    images = {image["img_id"] for image in read(synthetic_folder, "train")}
    pairs = read(synthetic_folder, "train_nlvr2")
    assert pairs and {pair["label"] for pair in pairs} == {0, 1}
    assert all({pair["img0"], pair["img1"]} <= images for pair in pairs)
    assert len({pair["uid"] for pair in pairs}) == len(pairs)


def test_rows_of_features(synthetic_folder):
    lines = (synthetic_folder / "lxmert" / f"val_obj{REGIONS}.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [image["img_id"] for image in read(synthetic_folder, "val")]
    for line in lines:
        name, height, width, *cells = line.split("\t")
        kinds = (np.int64, np.float32, np.int64, np.float32)
        classes, scores, attributes, attribute_scores = (
            np.frombuffer(base64.b64decode(cell), kind) for cell, kind in zip(cells[:4], kinds, strict=True)
        )
        boxes = np.frombuffer(base64.b64decode(cells[5]), np.float32).reshape(-1, 4)
        features = np.frombuffer(base64.b64decode(cells[6]), np.float32).reshape(REGIONS, -1)
        assert int(cells[4]) == REGIONS == len(classes) == len(attributes) == len(boxes), name
        assert features.shape[1] == FEATURE_DIM
        assert (boxes[:, 2:] > boxes[:, :2]).all() and (boxes >= 0).all()
        assert (boxes <= np.array([int(width), int(height)] * 2)).all()
        assert ((scores > 0) & (scores <= 1)).all() and ((attribute_scores > 0) & (attribute_scores <= 1)).all()
        assert (features[:, :6].argmax(axis=1) == classes).mean() > 0.8, "features tell the class"
