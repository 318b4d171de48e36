"""The readers of the official LXMERT files against what the official code made of small ones: which items there are,
their sentences, boxes, features, labels and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from e2e_vl.config import BoxSource, DataConfig
from e2e_vl.data.answer_lists import read_answers
from e2e_vl.data.base import DataNeeds, VLDataset, open_options
from e2e_vl.data.features import TsvStore
from e2e_vl.data.image_loader import StoredBoxes
from e2e_vl.data.lxmert import ImageSentenceDataset, ListedPairDataset, ScoredQuestionDataset
from e2e_vl.metrics.vqa import VQAPrediction
from e2e_vl.registry import DATASETS
from e2e_vl.samples import ScoredAnswers
from e2e_vl.tasks.config import GQAConfig, VQAConfig
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.question_answering import AnswerTask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import simplify_answer
from tests.parity import lxmert_common as common
from tests.parity import lxmert_data_checks as data_checks
from tests.parity.lxmert_common import assert_near

golden, rules = common.golden, data_checks.rules

IMAGE_SETS = {  # the official code's own table
    "mscoco_train": "mscoco_imgfeat/train2014",
    "mscoco_minival": "mscoco_imgfeat/val2014",
    "mscoco_nominival": "mscoco_imgfeat/val2014",
    "vgnococo": "vg_gqa_imgfeat/vg_gqa",
}
OF_VQA = {
    "train": "mscoco_imgfeat/train2014",
    "nominival": "mscoco_imgfeat/val2014",
    "minival": "mscoco_imgfeat/val2014",
    "test": "mscoco_imgfeat/test2015",
}
OF_GQA = {
    "train": "vg_gqa_imgfeat/vg_gqa",
    "valid": "vg_gqa_imgfeat/vg_gqa",
    "testdev": "vg_gqa_imgfeat/gqa_testdev",
}
KINDS: dict[str, tuple[type[VLDataset], dict[str, str], str]] = {
    "vqa": (ScoredQuestionDataset, OF_VQA, "question_id"),
    "gqa": (ScoredQuestionDataset, OF_GQA, "question_id"),
    "nlvr2": (ListedPairDataset, {}, "identifier"),
}
ANSWERING: dict[str, Callable[[list[str]], AnswerTask]] = {
    "vqa": lambda answers: VQATask(4, VQAConfig(answers=answers)),
    "gqa": lambda answers: GQATask(4, GQAConfig(answers=answers)),
}


def opened(golden, kind: type[VLDataset], files: dict[str, str], sets: dict[str, str], split: str) -> VLDataset:
    golden.require("data")
    options = {"image_sets": sets, "skip_missing_images": True}
    name = next(name for name, part in DATASETS.items() if part.cls is kind)
    settings = DataConfig(name=name, root=str(golden.folder / "data"), files=files, config=options)
    return kind(*open_options(kind, settings), split, DataNeeds(BoxSource.PRECOMPUTED))


def test_items_of_pretraining(golden, rules):
    """In the official order within each file: sources and sentences as they stand in it."""
    golden.require("data")
    listed = list(dict.fromkeys(item["img_id"] for item in rules["flattened"]))
    files = {"sentences": "lxmert/{split}.json", "features": "{images}_obj36.tsv"}
    ours: dict[str, Any] = {}
    order = [item["uid"] for item in rules["flattened"]]
    for split in IMAGE_SETS:
        if not (golden.folder / "data" / "lxmert" / f"{split}.json").is_file():
            continue
        dataset = opened(golden, ImageSentenceDataset, files, IMAGE_SETS, split)
        own = {text.metadata["uid"]: text for group in dataset.groups for text in dataset.sample(group).texts}
        own = {uid: text for uid, text in own.items() if text.metadata["image_id"] in listed}
        assert [uid for uid in order if uid in own] == list(own), split
        ours |= own
    assert set(ours) == set(order)
    answers = set(rules["answer_table"]["answers_in_order"])
    for item in rules["flattened"]:
        text = ours[item["uid"]]
        assert (text.words, text.metadata["image_id"]) == (item["sent"], item["img_id"])
        assert isinstance(text.truth, ScoredAnswers) == ("label" in item)
        if "label" in item:
            plain = {simplify_answer(answer) for answer in text.truth.scores}
            assert plain & answers == set(item["label"]), item["uid"]


def items(rules) -> list[tuple[str, list[str]]]:
    """Of each recorded set of items the data set and its splits."""
    return [(name.partition(":")[0], name.partition(":")[2].split(",")) for name in rules["finetune_items"]]


def open_items(golden, name: str, splits: list[str]) -> VLDataset:
    kind, sets, _ = KINDS[name]
    key = "examples" if kind is ListedPairDataset else "questions"
    default = {split: f"{name}_imgfeat/{split}" for split in splits}
    files = {key: f"{name}/{{split}}.json", "features": "{images}_obj36.tsv"}
    return opened(golden, kind, files, default | sets, "+".join(splits))


def features_of(golden, dataset: VLDataset) -> StoredBoxes:
    paths = dict.fromkeys(golden.folder / "data" / f"{part['images']}_obj36.tsv" for part in dataset.split_values)
    return StoredBoxes([TsvStore(path) for path in paths], None, with_features=False)


def test_items_of_fine_tuning(golden, rules):
    """Also that items without features are left out, as the official code does."""
    assert items(rules)
    for name, splits in items(rules):
        dataset = open_items(golden, name, splits)
        recorded = rules["finetune_items"][f"{name}:{','.join(splits)}"]
        texts = [dataset.sample([number]).texts[0] for number in range(len(dataset))]
        assert [text.words for text in texts] == [one["sentence"] for one in recorded]
        if name != "nlvr2":
            assert [text.metadata["question_id"] for text in texts] == [one["id"] for one in recorded]
        else:
            assert [text.truth.number for text in texts] == [one["label"] for one in recorded]


def test_boxes_and_features_of_fine_tuning(golden, rules):
    arrays, seen = golden["data"], set()
    for name, splits in items(rules):
        dataset = open_items(golden, name, splits)
        store = features_of(golden, dataset)
        for number in range(len(dataset)):
            prefix = f"{name}.{'+'.join(splits)}.{number}."
            boxes, features = [], []
            for image in dataset.sample([number]).images:
                found = next(one for one in store.stores if image.id in one)[image.id]
                height, width = found.image_size
                boxes.append(found.boxes / np.array([width, height, width, height], dtype=np.float32))
                features.append(found.features)
            if name != "nlvr2":
                [boxes] = boxes
            else:
                np.testing.assert_array_equal(np.stack(features), arrays[f"{prefix}feats"], prefix)
            assert_near(torch.from_numpy(np.stack(boxes)), arrays[f"{prefix}boxes"], prefix)
            seen |= {f"{prefix}boxes", f"{prefix}feats", f"{prefix}target"}
    recorded = {key for key in arrays if key.startswith(tuple(f"{name}." for name in KINDS))}
    assert recorded <= seen, "every recorded array is looked at"


@pytest.mark.parametrize("name", ANSWERING)
def test_targets_of_fine_tuning(golden, rules, name):
    golden.require("data")
    arrays = golden["data"]
    if name not in (kind for kind, _ in items(rules)):
        pytest.skip(f"the set has no items of {name}; they are optional")
    task = ANSWERING[name](read_answers(golden.folder / "data" / name / "trainval_label2ans.json"))
    by_class = read_answers(golden.folder / "data" / name / "trainval_ans2label.json")
    assert task.answers == by_class
    labelled = 0
    for splits in (splits for kind, splits in items(rules) if kind == name):
        dataset = open_items(golden, name, splits)
        for number, truth in enumerate(dataset.truths()):
            judged = task.answer_vocabulary.labels_of(truth)
            recorded = arrays.get(f"{name}.{'+'.join(splits)}.{number}.target")
            assert (judged is None) == (recorded is None)
            if recorded is not None:
                np.testing.assert_array_equal(task.answer_vocabulary.targets_of(judged.scores), recorded)
                labelled += 1
    assert labelled


def test_accuracy_of_answers_in_pretraining(rules):
    """The mean score of the predicted answers, over the items whose source has labels."""
    recorded = rules.get("pretrain_qa_evaluation")
    if recorded is None:
        pytest.skip("the set has no evaluation of answers; it is optional")
    scores: dict[str, list[float]] = {}
    for item in rules["flattened"]:
        if item["uid"] in recorded["predictions"]:
            answer = recorded["predictions"][item["uid"]]
            score = VQAPrediction(answer=answer, score=1.0, answer_scores=item["label"]).accuracy
            source = item["uid"].removeprefix(item["img_id"] + "_").rpartition("_")[0]
            scores.setdefault(source, []).append(score)
    together = [score for own in scores.values() for score in own]
    assert len(together) == len(recorded["predictions"])
    assert np.mean(together) == pytest.approx(recorded["accuracy"])
    assert {source: np.mean(own) for source, own in scores.items()} == pytest.approx(recorded["per_source"])
