"""The files of the official LXMERT code: keys, regions, labels that fit the questions."""

from __future__ import annotations

import json
from pathlib import Path

from e2e_vl.data.features import open_features
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


def test_features_tell_the_class(synthetic_folder):
    store = open_features(synthetic_folder / "lxmert" / f"val_obj{REGIONS}.tsv")
    for image in read(synthetic_folder, "val"):
        row = store[image["img_id"]]
        assert row.features.shape == (REGIONS, FEATURE_DIM) and len(row.boxes) == REGIONS
        assert (row.features[:, :6].argmax(axis=1) == row.classes).mean() > 0.8
