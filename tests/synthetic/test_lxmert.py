"""The files of the official LXMERT code: keys, regions, labels that fit the questions."""

from __future__ import annotations

import json
from pathlib import Path

from e2e_vl.data.features import open_features
from e2e_vl.synthetic.lxmert import FEATURE_DIM, REGIONS
from tests.synthetic.meaning import SPLITS


def read(folder: Path, name: str) -> list:
    return json.loads((folder / "lxmert" / f"{name}.json").read_text(encoding="utf-8"))


def test_sentences_questions_and_pairs_agree(synthetic_folder):
    answers = read(synthetic_folder, "trainval_label2ans")
    assert [row["ans"] for row in read(synthetic_folder, "all_ans")] == answers == sorted(set(answers))
    for split in ("train", "val"):
        images = {image["img_id"]: image for image in read(synthetic_folder, split)}
        assert len(images) == SPLITS[split]
        asked = {}
        for name, image in images.items():
            assert image["sentf"]["mscoco"] and (synthetic_folder / f"images/train2014/{name}.jpg").is_file()
            pairs = zip(image["sentf"]["vqa"], image["labelf"]["vqa"], strict=True)
            asked |= {(name, text): label for text, label in pairs}
        questions = read(synthetic_folder, f"{split}_vqa")
        assert {(one["img_id"], one["sent"]): one["label"] for one in questions} == asked
        assert len({one["question_id"] for one in questions}) == len(questions)
        for label in asked.values():
            assert set(label) <= set(answers) and set(label.values()) <= {0.3, 0.6, 0.9, 1.0}
            assert max(label.values()) >= 0.9
        pairs = read(synthetic_folder, f"{split}_nlvr2")
        assert {pair["label"] for pair in pairs} == {0, 1} and len({pair["uid"] for pair in pairs}) == len(pairs)
        assert all({pair["img0"], pair["img1"]} <= set(images) for pair in pairs)


def test_features_tell_the_class(synthetic_folder):
    store = open_features(synthetic_folder / "lxmert" / f"val_obj{REGIONS}.tsv")
    for image in read(synthetic_folder, "val"):
        row = store[image["img_id"]]
        assert row.features.shape == (REGIONS, FEATURE_DIM) and len(row.boxes) == REGIONS
        assert (row.features[:, :6].argmax(axis=1) == row.predictions.classes).mean() > 0.8
