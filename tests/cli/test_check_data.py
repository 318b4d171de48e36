"""The command: problems of synthetic data that were broken, sizes, and images that are shared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import numpy as np
import pytest
from PIL import Image

from detector.errors import UserError
from e2e_vl.cli import check_data as tool
from e2e_vl.cli.check_data import SplitReport, check_data
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import Request
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.data.overlap import GlobalImageId, ImageIdLookup
from e2e_vl.run.build import build_run, resolve_config
from tests.conftest import ROOT
from tests.run.runs import TINY_DETECTOR
from tests.weights.starts import replaced

TINY = ROOT / "configs" / "tiny"


@pytest.fixture
def data(tiny_data, tmp_path) -> Path:
    return shutil.copytree(tiny_data, tmp_path / "data")


def settings(name: str, root: Path, *words: str) -> RunConfig:
    path = ROOT / "configs" / "demo" / "detection.yaml" if name == "detection" else TINY / f"{name}.yaml"
    return load_config(path, [TINY_DETECTOR, f"data.root={root}", "output=unused", *words])


def check(config: RunConfig, others: dict[str, RunConfig] | None = None, detector_ids=frozenset()) -> list[SplitReport]:
    return check_data(config, others or {}, ImageIdLookup(), set(detector_ids))


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("name", ["refcoco", "vqa", "vcr", "nlvr2", "pretraining", "lxmert_files", "detection"])
def test_intact_data_have_sizes_and_no_problem(name, tiny_data):
    answers = "task.config.objectives.image_qa.answers=[red, blue]"
    words = (answers, "data.max_text_length=40") if name == "lxmert_files" else ()
    train, val = check(settings(name, tiny_data, *words))
    assert train.problems == val.problems == train.shared == val.shared == []
    numbers = {"nlvr2": (48, 24), "vcr": (3, 2)}  # two images for each scene's pairs; scenes without a question
    assert (train.images, val.images) == numbers.get(name, (12, 6))
    assert train.missing_images == train.boxes_outside == train.too_long == 0
    assert train.texts >= 12 and (train.boxes > 12 or name == "lxmert_files")


def test_broken_samples_and_splits_are_listed_and_do_not_hide_the_others(data):
    question = json.loads((data / "vcr" / "val.jsonl").read_text().splitlines()[0])
    change_json(data / "vcr" / "vcr1images" / question["metadata_fn"], lambda content: content["boxes"].pop())
    _, val = check(settings("vcr", data))
    assert len(val.problems) == 1 and "boxes" in val.problems[0] and val.images == 1
    (data / "nlvr2" / "data" / "train.json").unlink()
    train, val = check(settings("nlvr2", data))
    assert len(train.problems) == 1 and "train.json" in train.problems[0]
    assert val.problems == [] and val.images == 24


def test_missing_images_are_counted(data):
    for path in sorted((data / "images" / "train2014").iterdir())[:2]:
        path.unlink()
    reports = check(settings("refcoco", data))
    assert sum(report.missing_images for report in reports) == 2 == sum(len(report.problems) for report in reports)
    reports = check(settings("refcoco", data, "data.skip_broken=true", "data.eval_splits=[train]"))
    assert [report.problems for report in reports] == [[]], "training leaves them out"


def test_boxes_that_leave_their_image_and_long_texts_are_counted(data):
    path = data / "refcoco+" / "instances.json"
    change_json(path, lambda content: content["annotations"][0]["bbox"].__setitem__(2, 9999))
    train, val = check(settings("refcoco", data, "data.max_text_length=4"))
    assert train.problems == val.problems == [] and train.boxes_outside + val.boxes_outside == 1
    assert 0 < train.too_long < train.texts


def first_image(root: Path) -> Path:
    return min((root / "images" / "train2014").iterdir())


def cut_image(root: Path) -> None:
    path = first_image(root)
    path.write_bytes(path.read_bytes()[:20])


def widen_image(root: Path) -> None:
    with Image.open(first_image(root)) as image:
        image.resize((image.width + 1, image.height)).save(first_image(root))


def move_detections(root: Path) -> None:
    path = root / "detections" / "refcoco+_unc" / "res101_coco_minus_refer_notime_dets.json"
    change_json(path, lambda rows: [row.update(box=[9000, 9000, 9, 9]) for row in rows])


def move_named_objects(root: Path) -> None:
    for path in (root / "vcr" / "vcr1images").rglob("*.json"):
        change_json(path, lambda content: content.update(boxes=[[900, 900, 990, 990, 1]] * len(content["boxes"])))


def lengthen_question(root: Path) -> None:
    path = root / "vqa" / "v2_OpenEnded_mscoco_train_questions.json"
    change_json(path, lambda content: content["questions"][5].update(question="what " * 600))


def remove_images(root: Path) -> None:
    path = root / "detection" / "instances_train.json"
    change_json(path, lambda content: content.update(images=[], annotations=[]))


def training_error(config: RunConfig) -> str:
    """What the first epoch of a run stops at."""
    with pytest.raises(UserError) as caught:
        examples = build_run(resolve_config(config)).train_data
        for number, texts in enumerate(examples.groups):
            examples[Request(number, tuple(texts))]
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "words", "part"),
    [
        ("refcoco", cut_image, (), "damaged or in another format"),
        ("refcoco", widen_image, (), "in its annotation file"),
        ("refcoco", move_detections, ("data.boxes.train=detections",), "lies outside"),
        ("refcoco", None, ("detector.overrides.MODEL.ROI_HEADS.NUM_CLASSES=1",), "NUM_CLASSES"),
        ("vcr", move_named_objects, (), "lies outside"),
        ("vqa", lengthen_question, (), "has 604 wordpieces, but the encoder reads at most"),
        ("vqa", None, ("task.config.answers=[nobody]",), "Not one of the"),
        ("detection", remove_images, (), "no image for the split train"),
    ],
)
def test_what_training_stops_at_is_a_problem(data, tmp_path, name, change, words, part):
    if change is not None:
        change(data)
    config = replaced(settings(name, data, *words), data={"synthetic": {"scenes": {}}})
    error = training_error(msgspec.structs.replace(config, output=str(tmp_path / "run")))
    assert part in error
    train, _ = check(config)
    assert any(problem in error or problem.removeprefix("train: ") in error for problem in train.problems)


def test_an_image_of_another_size_hides_no_other(data):
    widen_image(data)
    train, _ = check(settings("refcoco", data))
    assert len(train.problems) == 1 and train.images == 12


def test_a_long_text_is_no_problem_where_it_is_truncated(data):
    lengthen_question(data)
    train, _ = check(settings("vqa", data, "data.max_text_length=64"))
    assert train.too_long == 1 and train.problems == []


def test_region_features_of_another_width_are_a_problem(data):
    images = json.loads((data / "refcoco+" / "instances.json").read_text())["images"]
    for image in images:
        size, boxes = (image["height"], image["width"]), np.array([[0, 0, 20, 20]], np.float32)
        regions = RegionFeatures(str(image["id"]), size, boxes, np.ones((1, 3)), image_feature=np.ones(3))
        save_npz(data / "features" / f"{image['id']}.npz", regions)
    words = ("detector.backend=precomputed", "detector.loss_weight=0", "data.boxes.train=precomputed")
    train, val = check(settings("refcoco", data, *words, "eval.boxes=[precomputed]", "data.files.features=features"))
    assert len(train.problems) == 12 and len(val.problems) == 6 and "but width 64 in" in val.problems[0]


def test_images_of_other_data_sets_and_of_the_detector_are_found(tiny_data):
    data = {"synthetic": {"scenes": {}}}  # as if they had not been drawn: their names are then names of COCO
    config = replaced(settings("refcoco", tiny_data), data=data)
    other = replaced(settings("vqa", tiny_data), data=data | {"train_split": "val"})
    _, val = check(config, {"other.yaml": other}, {GlobalImageId("coco", "1")})
    [sentence] = val.shared
    assert sentence.startswith("6 of 6 images of val are in the training split val of other.yaml (such as ")
    images = json.loads((tiny_data / "refcoco+" / "instances.json").read_text())["images"]
    _, val = check(config, detector_ids={GlobalImageId("coco", str(row["id"])) for row in images})
    assert val.shared[0].startswith("6 of 6 images of val are in the detector's training images")


def words(root: Path, *more: object) -> list[str]:
    return [str(word) for word in ("--config", TINY / "refcoco.yaml", *more, TINY_DETECTOR, f"data.root={root}")]


def test_command(tiny_data, data, tmp_path, capsys):
    output = tmp_path / "new" / "found.json"
    assert tool.main(words(tiny_data, "--json", output)) == 0
    printed = capsys.readouterr().out
    assert "val: " in printed and "6 images (6 distinct)" in printed and "no problem found" in printed
    assert [split["images"] for split in json.loads(output.read_text())["splits"]] == [12, 6]

    other = tmp_path / "other.yaml"
    detector = f"detector: {{config: {ROOT / 'configs' / 'detector' / 'tiny.yaml'}}}"
    other.write_text(f"base: {TINY / 'vqa.yaml'}\ndata: {{root: {tiny_data}, train_split: val}}\n{detector}\n")
    assert tool.main(words(tiny_data, "--with", other)) == 0
    assert "SHARED: 6 of 6 images of val are in the training split val of" in capsys.readouterr().out
    assert tool.main(words(tiny_data, "--with", other, "--no-overlap")) == 1
    capsys.readouterr()
    assert tool.main(words(tiny_data, "--with", ROOT / "configs" / "pretraining" / "mdetr.yaml")) == 1
    printed = capsys.readouterr().out
    missing = tiny_data / "mdetr_annotations" / "final_mixed_train.json"
    assert "PROBLEM: " in printed and "mdetr.yaml cannot be compared: " in printed and str(missing) in printed

    for path in (data / "images" / "train2014").iterdir():
        path.unlink()
    assert tool.main(words(data, "--examples", 2)) == 1
    printed = capsys.readouterr().out
    assert printed.count("PROBLEM: ") == 4 and "... and 10 more problems" in printed


def test_missing_weights_and_tokenizer_are_named_before_the_data(tiny_data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    missing = ["detector.weights=nope.pth", "encoder.weights=bert-base-uncased", "task.weights=old_run"]
    output = tmp_path / "report.json"
    assert tool.main(words(tiny_data, *missing, "data.vocabulary=bert-base-uncased", "--json", output)) == 1
    weights = json.loads(output.read_text())["missing_weights"]
    assert [problem.partition(":")[0] for problem in weights] == ["nope.pth", "bert-base-uncased", "old_run"]
    printed = capsys.readouterr().out
    assert printed.splitlines()[:3] == [f"PROBLEM: {problem}" for problem in weights]
    assert "PROBLEM: bert-base-uncased: no tokenizer could be loaded from it" in printed


def test_a_split_without_files_has_problems_and_no_counts(tmp_path, capsys):
    assert tool.main(words(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "train: could not be read\nPROBLEM: train: " in printed
    assert "0 images" not in printed
