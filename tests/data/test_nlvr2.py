"""NLVR2: sentences about pairs, where their images are, and damaged lines."""

from __future__ import annotations

from typing import Any

import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data.base import open_options
from e2e_vl.data.nlvr2 import NLVR2Dataset, read_examples
from e2e_vl.samples import CorrectChoice
from tests.data.helpers import open_dataset, refused, with_options, write_json, write_json_lines


def line(identifier: str, label: str | None = "True", **more: Any) -> dict[str, Any]:
    record = {"identifier": identifier, "sentence": f"Is it {identifier}?", "left_url": "l", "right_url": "r"}
    return record | ({} if label is None else {"label": label}) | {"synset": "cup", "writer": "1"} | more


TRAIN = [
    line("train-3-0-0", directory=17),
    line("train-3-1-0", "False", directory=17),
    line("train-3-0-1", directory=17),
]
DEV = [line("dev-8-2-1", "False", validation={"1": "True"}, extra_validations={"2": "False"})]


@pytest.fixture
def settings(tmp_path) -> DataConfig:
    contents = {"train": TRAIN, "dev": DEV, "balanced/balanced_dev": DEV, "test2": [line("test2-1-0-0", None)]}
    for split, rows in contents.items():
        write_json_lines(tmp_path / "data" / f"{split}.json", rows)
    instances: dict[str, list] = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cup"}]}
    for number, name in enumerate(("train-3-0-img0", "train-3-0-img1", "train-3-1-img0", "train-3-1-img1"), start=1):
        instances["images"].append(
            {"id": number, "file_name": f"train/17/{name}.png", "width": 30 + number, "height": 20}
        )
        instances["annotations"].append({"id": number, "image_id": number, "category_id": 1, "bbox": [1, 2, number, 5]})
    write_json(tmp_path / "instances.json", instances)
    files = {"examples": "data/{split}.json", "images": "images/{images}", "instances": "instances.json"}
    return DataConfig(name="nlvr2", root=str(tmp_path), files=files)


def make(settings, split="train", boxes="online", *, training=False, objects=False) -> NLVR2Dataset:
    return open_dataset(NLVR2Dataset, settings, split, boxes, objects=objects, training=training)


def test_sentences_about_the_same_pair_are_one_group(settings, tmp_path):
    dataset = make(settings)
    assert len(dataset) == 3 and list(dataset.groups) == [[0, 2], [1]]
    sample = dataset.sample((0, 2))
    assert [image.id for image in sample.images] == ["train-3-0-img0", "train-3-0-img1"]
    assert sample.images[0].locate() == tmp_path / "images" / "train" / "17" / "train-3-0-img0.png"
    first, second = sample.texts
    assert first.image_index == second.image_index == (0, 1)
    assert (first.words, first.truth) == ("Is it train-3-0-0?", CorrectChoice(1))
    assert first.metadata == {"identifier": "train-3-0-0", "synset": "cup"}
    assert list(dataset.truths()) == [CorrectChoice(1), CorrectChoice(0), CorrectChoice(1)]
    assert list(dataset.image_ids()) == [f"train-3-{pair}-img{side}" for pair in (0, 1) for side in (0, 1)]


def test_images_lie_in_the_folder_of_the_first_part_of_the_identifier(settings, tmp_path):
    for split in ("dev", "balanced/balanced_dev"):
        [image, _] = make(settings, split).sample((0,)).images
        assert image.locate() == tmp_path / "images" / "dev" / "dev-8-2-img0.png"
    flat = with_options(settings, use_folders=False, suffix=".jpg")
    assert make(flat).sample((0,)).images[1].locate() == tmp_path / "images" / "train" / "train-3-0-img1.jpg"


def test_annotated_objects_are_found_by_file_name(settings):
    dataset = make(settings, boxes="gt", objects=True)
    left, right = dataset.sample((1,)).images
    assert left.objects.boxes.tolist() == [[1, 2, 4, 7]] and right.objects.boxes.tolist() == [[1, 2, 5, 7]]
    assert left.size == (20, 33) and left.id == "train-3-1-img0" and dataset.class_names == ["cup"]
    with refused("instances.json", "dev-8-2-img0"):
        make(settings, "dev", boxes="gt")


def test_splits_are_joined(settings):
    dataset = make(settings, "train+dev")
    assert len(dataset) == 4 and [values["images"] for values in dataset.split_values] == ["train", "dev"]
    options = open_options(NLVR2Dataset, settings)
    assert list(NLVR2Dataset.texts_of(*options, "dev+train"))[:2] == ["Is it dev-8-2-1?", "Is it train-3-0-0?"]
    with refused("dev-8-2-1", "dev+balanced/balanced_dev", "twice"):
        make(settings, "dev+balanced/balanced_dev")


def test_a_split_without_labels_can_be_predicted_but_not_learned(settings):
    [text] = make(settings, "test2").sample((0,)).texts
    assert text.truth is None
    with refused("test2", "labels"):
        make(settings, "test2", training=True)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("no json", ["line 2"]),
        (line("../dev-1-0-0"), ["line 2", "identifier"]),
        (line("dev-1-0-0", "true"), ["line 2", "label"]),
        (line("dev-1-0-0", sentence=" "), ["line 2", "sentence"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, parts):
    with refused("dev.json", *parts):
        read_examples(write_json_lines(tmp_path / "dev.json", [*DEV, row]))


def test_a_line_without_a_label_among_others_is_named(settings, tmp_path):
    write_json_lines(tmp_path / "data" / "train.json", [*TRAIN, line("train-3-1-1", None)])
    assert make(settings)[3] == "Is it train-3-1-1?"
    with refused("1 of 4 have no label", "train-3-1-1"):
        make(settings, training=True)


def test_a_repeated_line_is_skipped_and_a_file_without_lines_is_named(tmp_path, caplog):
    assert len(read_examples(write_json_lines(tmp_path / "dev.json", [*DEV, DEV[0]]))) == len(DEV)
    assert "skipped 1 examples that repeat an earlier one" in caplog.text
    with refused("dev.json", "no examples"):
        read_examples(write_json_lines(tmp_path / "dev.json", []))
