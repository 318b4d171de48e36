"""The VQA data set on three photos: texts, flips, joined splits, box sources, controls."""

from __future__ import annotations

import json

import numpy as np
import pytest

from e2e_vl.config import BoxSettings, DataSettings, ResizeSettings
from e2e_vl.data.collate import collate
from e2e_vl.data.examples import Request
from e2e_vl.data.features.record import RegionFeatures, save_npz
from e2e_vl.data.vqa import VQADataset

GT_7 = [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 99, 59]]
QUESTIONS = {"train2014": [(7, "red square left"), (3, "tall green"), (7, "blue")], "val2014": [(9, "left square")]}
SPLITS = {**QUESTIONS, "test2015": [(9, "a box")]}


@pytest.fixture
def settings(tiny) -> DataSettings:
    """Settings of a folder with the tiny photos under the names of COCO."""
    root = tiny.images_root.parent
    (root / "vqa").mkdir()
    for split, questions in SPLITS.items():
        rows = [
            {"question_id": 1000 * image + number, "image_id": image, "question": text}
            for number, (image, text) in enumerate(questions)
        ]
        kinds = {"answer_type": "other", "question_type": "what", "multiple_choice_answer": "left side"}
        answers = [{"answer": answer, "answer_id": 1} for answer in ["left side"] * 6 + ["left"] * 4]
        annotations = [
            {"question_id": row["question_id"], "image_id": row["image_id"], "answers": answers, **kinds}
            for row in rows
        ]
        content = {"data_subtype": split, "questions": rows}
        (root / "vqa" / f"{split}_questions.json").write_text(json.dumps(content))
        if split != "test2015":
            (root / "vqa" / f"{split}_annotations.json").write_text(json.dumps({"annotations": annotations}))
        (root / split).mkdir()
        for image in tiny.instances["images"]:
            name = root / split / f"COCO_{split}_{image['id']:012d}.jpg"
            name.write_bytes((tiny.images_root / image["file_name"]).read_bytes())
    return DataSettings(
        name="vqa",
        root=str(root),
        files={
            "images": "{images}",
            "questions": "vqa/{split}_questions.json",
            "annotations": "vqa/{split}_annotations.json",
            "instances": "instances.json",
            "detections": "dets.json",
        },
        boxes=BoxSettings(),
        resize=ResizeSettings(short_edge=[60], long_edge=1000),
        flip=0.0,
    )


def make(settings, tiny, split="train2014", boxes="gt", training=True, with_objects=False) -> VQADataset:
    return VQADataset.from_settings(
        settings,
        tiny.tokenizer,
        split,
        boxes=boxes,
        training=training,
        seed=0,
        channel_order="RGB",
        with_objects=with_objects,
    )


def words(dataset, text) -> list[str]:
    return dataset.tokenizer.convert_ids_to_tokens(text.input_ids.tolist())


def test_texts_and_images(settings, tiny):
    dataset = make(settings, tiny, with_objects=True)
    assert len(dataset) == 3 and dataset.groups == [[0, 2], [1]]
    example = dataset[Request(0, (0, 2))]
    [image] = example.images
    assert image.name.endswith("train2014/COCO_train2014_000000000007.jpg")
    np.testing.assert_array_equal(image.boxes, GT_7)
    assert len(image.objects.boxes) == 2
    first, second = example.texts
    assert words(dataset, first) == ["[CLS]", "red", "square", "left", "[SEP]", "[MASK]", "[SEP]"]
    assert first.segment_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert first.positions == {"mask": 5} and second.positions == {"mask": 3}
    assert first.record["question_id"] == 7000 and first.record["answers"] == ["left side"] * 6 + ["left"] * 4
    assert first.record == json.loads(json.dumps(first.record))
    assert (first.record["text_index"], second.record["text_index"]) == (0, 2)
    batch = collate([example, dataset[Request(1, (1,))]], (0, 0, 0), (1, 1, 1))
    assert batch.texts.positions["mask"].tolist() == [5, 3, 4]
    dataset.check_classes(2)
    with pytest.raises(ValueError, match="has 2 categories, but the detector has 1"):
        dataset.check_classes(1)


def test_a_flip_swaps_left_and_right_in_question_and_answers(settings, tiny):
    settings.flip = 1.0
    dataset = make(settings, tiny)
    example = dataset[Request(0, (0,))]
    [text] = example.texts
    assert words(dataset, text)[1:4] == ["red", "square", "right"]
    assert text.record["answers"] == ["right side"] * 6 + ["right"] * 4
    np.testing.assert_array_equal(example.images[0].boxes[0], [69, 20, 89, 40])
    evaluated = make(settings, tiny, training=False)[Request(0, (0,))].texts[0]
    assert evaluated.record["flipped"] is False and evaluated.record["answers"][0] == "left side"


def test_splits_are_joined_and_share_files(settings, tiny):
    dataset = make(settings, tiny, "train2014+val2014", boxes="detections")
    assert len(dataset) == 4 and dataset.groups == [[0, 2], [1], [3]]
    assert dataset.parts[0].source is dataset.parts[1].source
    example = dataset[Request(2, (3,))]
    assert example.images[0].name.endswith("val2014/COCO_val2014_000000000009.jpg")
    assert len(example.images[0].boxes) == 1
    assert len(VQADataset.texts_of(settings, "train2014+val2014")) == 8
    assert VQADataset.answers_of(settings, "val2014") == {9000: "left side"}
    with pytest.raises(ValueError, match="question 7000 is in two of the splits"):
        make(settings, tiny, "train2014+train2014")
    with pytest.raises(ValueError, match="has an empty name"):
        make(settings, tiny, "train2014+")


def test_a_test_split_has_no_answers(settings, tiny):
    text = make(settings, tiny, "test2015", training=False)[Request(0, (0,))].texts[0]
    assert "answers" not in text.record
    with pytest.raises(FileNotFoundError, match=r"test2015_annotations\.json"):
        make(settings, tiny, "test2015", training=True)


@pytest.mark.parametrize(
    ("subtype", "images"),
    [("test-dev2015", "test2015"), ("valminusminival2014", "val2014"), ("minival2014", "val2014"), ("own", "own")],
)
def test_names_of_image_sets(settings, tiny, subtype, images, tmp_path):
    path = tmp_path / "vqa" / "test2015_questions.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "data_subtype": None}))
    path.rename(path.with_name(f"{subtype}_questions.json"))
    del settings.files["annotations"]
    dataset = make(settings, tiny, subtype, training=False)
    assert dataset.parts[0].image_path(9) == tmp_path / images / f"COCO_{images}_000000000009.jpg"


def test_controls(settings, tiny):
    settings.blank_text, settings.blank_image = True, True
    example = make(settings, tiny)[Request(0, (0,))]
    assert example.images[0].boxes.shape == (0, 4)
    assert np.unique(example.images[0].pixels.reshape(-1, 3), axis=0).tolist() == [[123, 116, 103]]
    assert example.texts[0].segment_ids.tolist() == [0, 0, 1, 1] and example.texts[0].positions == {"mask": 2}


def test_long_questions_lose_their_last_pieces(settings, tiny):
    settings.max_text_length = 5
    dataset = make(settings, tiny)
    text = dataset[Request(0, (0,))].texts[0]
    assert words(dataset, text) == ["[CLS]", "red", "[SEP]", "[MASK]", "[SEP]"]
    assert text.record["cut_wordpieces"] == 2
    settings.max_text_length = 3
    with pytest.raises(ValueError, match="alone need 4"):
        make(settings, tiny)


@pytest.fixture
def precomputed(settings, tiny):
    folder = tiny.images_root.parent / "features"
    folder.mkdir()
    for image in tiny.instances["images"]:
        size = (image["height"], image["width"])
        features = np.arange(8, dtype=np.float32).reshape(2, 4)
        boxes = np.array([[0, 0, 10, 10], [5, 5, 20, 20]], dtype=np.float32)
        save_npz(folder / f"{image['id']}.npz", RegionFeatures(str(image["id"]), size, boxes, features))
    settings.files["features"] = "features"
    del settings.files["instances"]
    return settings


def test_precomputed_features(precomputed, tiny):
    image = make(precomputed, tiny, boxes="precomputed")[Request(0, (0,))].images[0]
    assert image.features.shape == (2, 4) and image.image_feature.tolist() == [2, 3, 4, 5]  # the mean (official)
    precomputed.config = {"mean_image_feature": False}
    assert make(precomputed, tiny, boxes="precomputed")[Request(0, (0,))].images[0].image_feature is None


def test_mirrored_precomputed_features(precomputed, tiny):
    """As in the official code: boxes and words are mirrored, features are not."""
    precomputed.flip = 1.0
    with pytest.raises(ValueError, match=r"set data\.flip to 0"):
        make(precomputed, tiny, boxes="precomputed")
    precomputed.config = {"mirror_precomputed": True}
    dataset = make(precomputed, tiny, boxes="precomputed")
    example = dataset[Request(0, (0,))]
    np.testing.assert_array_equal(example.images[0].boxes[0], [89, 0, 99, 10])
    assert example.images[0].features[0, 0] == 0
    assert words(dataset, example.texts[0])[3] == "right"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda settings: settings.files.pop("questions"), r"data\.files\.questions is not set"),
        (lambda settings: settings.files.pop("annotations"), r"data\.files\.annotations is not set"),
        (lambda settings: settings.files.pop("images"), r"data\.files\.images is not set"),
        (lambda settings: settings.files.pop("instances"), r"box source 'gt' come from annotated objects"),
        (lambda settings: settings.config.update(colour=1), r"data\.config has the unknown key 'colour'"),
        (lambda settings: settings.config.update(image_name="a.jpg"), r"it must hold \{id\}"),
        (lambda settings: settings.config.update(image_name="{name}.jpg"), r"it takes \{id\} and \{images\}"),
        (lambda settings: settings.config.update(image_name=3), r"data\.config\.image_name is 3; it must be a str"),
        (lambda settings: settings.config.update(mean_image_feature="maybe"), r"'maybe'; it must be a bool"),
    ],
)
def test_settings_that_do_not_fit(settings, tiny, change, message):
    change(settings)
    with pytest.raises(ValueError, match=message):
        make(settings, tiny)


def test_an_image_that_is_missing_is_named(settings, tiny, tmp_path):
    (tmp_path / "train2014" / "COCO_train2014_000000000007.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"000000000007\.jpg: the file of image 7 is missing"):
        make(settings, tiny)[Request(0, (0,))]
    tiny.instances["images"].pop(0)
    tiny.instances["annotations"] = [row for row in tiny.instances["annotations"] if row["image_id"] != 7]
    tiny.write()
    with pytest.raises(ValueError, match=r"instances\.json: has no image 7 and 0 more of the split train2014"):
        make(settings, tiny)
