"""Files and options of the settings, what every data set promises, and texts about two images."""

from __future__ import annotations

import functools
import json
import pickle
import shutil
import types
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from detector.errors import UserError
from e2e_vl.config import BoxSource, DataConfig
from e2e_vl.data.base import DataFiles, VLDataset
from e2e_vl.data.batching import EncodedDataset, Request, collate
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.data.image_loader import Augmentation, open_boxes_of
from e2e_vl.registry import DATASETS
from e2e_vl.samples import AnnotatedObjects, Sample, SampleImage, SampleText
from tests.data.helpers import (
    DOUBLE,
    SAME,
    PlainPreprocessor,
    examples,
    make_loader,
    open_dataset,
    refused,
    write_json,
    write_json_lines,
)

KNOWN = ("images", "captions", "corpus")
BOXES = {7: [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 100, 60]], 3: [[5.5, 10, 25.75, 70]]}
SIZES = {7: (60, 100), 3: (80, 40)}  # (height, width)


def test_names_of_files_have_placeholders_and_start_from_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {"captions": "cc/{split}.json", "images": "/elsewhere/{images}", "corpus": "a.doc+{split}.doc"}
    data_files = DataFiles(DataConfig(name="captions", root="~/data", files=files), KNOWN)
    assert data_files.path("captions", split="val") == tmp_path / "data" / "cc" / "val.json"
    assert data_files.path("images", split="val", images="val2014") == Path("/elsewhere/val2014")
    assert data_files.name("corpus", split="val") == "a.doc+val.doc"
    assert "corpus" in data_files and "instances" not in data_files


def test_classes_are_compared_by_name_where_the_names_are_known():
    dataset = types.SimpleNamespace(class_names=["person", "Traffic light"])
    check = functools.partial(VLDataset.check_classes, dataset)
    check(2)
    check(2, ("person", "trafficlight"))
    check(3, ("person", "traffic_light", "boat"))  # the first ones mean the same
    for arguments in ((1,), (3,), (3, ("person", "boat", "traffic light")), (1, ("person",))):
        with pytest.raises(UserError):
            check(*arguments)
    dataset.class_names = None
    check(5)


def test_texts_images_and_truths_agree(dataset):
    texts = [text for group in dataset.groups for text in group]
    assert sorted(texts) == list(range(len(dataset))) and all(len(group) for group in dataset.groups)
    copy = pickle.loads(pickle.dumps(dataset))
    wholes = [copy.sample(group) for group in dataset.groups]
    assert list(dataset.image_ids()) in ([], [whole.images[0].id for whole in wholes])
    alone = [dataset.sample([text]) for text in range(len(dataset))]
    assert list(dataset.truths()) in ([], [sample.texts[0].truth for sample in alone])
    for group, whole in zip(dataset.groups, wholes, strict=True):
        assert [text.index for text in whole.texts] == list(group)
        if whole.pool is not None:
            assert whole.pool is copy and list(whole.own_texts) == list(group)
            assert [copy[text.index] for text in whole.texts] == [text.words for text in whole.texts]
        for text in whole.texts:
            [alone_text] = alone[text.index].texts
            assert (alone_text.words, alone_text.metadata, alone_text.image_index) == (text.words, text.metadata, (0,))
            assert alone[text.index].images[0].id == whole.images[0].id
            assert text.metadata == json.loads(json.dumps(text.metadata))


def test_images_and_their_objects(dataset):
    assert list(dataset.class_names) == ["square", "box"]
    for group, image_id in zip(dataset.groups[:2], (7, 3), strict=True):
        [image] = dataset.sample(group).images
        assert image.size == SIZES[image_id] and image.locate().is_file()
        assert image.boxes is None and image.boxes_to_mask is None and image.candidates is None
        np.testing.assert_array_equal(image.objects.boxes, BOXES[image_id])
        assert image.objects.boxes.dtype == np.float64
        assert list(image.objects.names) == [dataset.class_names[number] for number in image.objects.classes]


class Album(VLDataset):
    """Each text compares a photo with the next one."""

    groups = ([0], [1, 2], [3])

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def texts_of(cls, files, options, split):
        return ()

    def __len__(self) -> int:
        return 4

    def sample(self, texts: Sequence[int]) -> Sample:
        group = next(number for number, group in enumerate(self.groups) if texts[0] in group)
        sample_texts = (SampleText(text, f"red square {text}", {}, None, (0, 1)) for text in texts)
        return Sample((self._image(group), self._image((group + 1) % 3)), tuple(sample_texts))

    def _image(self, number: int) -> SampleImage:
        objects = AnnotatedObjects(np.array([[0.0, 0, 10 + number, 10]]), f"album {number}", np.array([number]))
        return SampleImage(str(number), self.folder / f"{number}.png", (20, 30 + number), objects)


def test_a_text_may_be_about_two_images(tmp_path, tiny):
    for number in range(3):
        Image.new("RGB", (30 + number, 20)).save(tmp_path / f"{number}.png")
    data = examples(Album(tmp_path), tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5)
    for epoch in range(6):
        example = data[Request(1, (1, 2), epoch)]
        first, second = example.images
        assert first.image_transform.flipped == second.image_transform.flipped, "a pair is augmented alike"
        assert first.pixels.shape[0] == second.pixels.shape[0]
        assert (first.box_classes.tolist(), second.box_classes.tolist()) == ([1], [2])
    batch = collate([data[Request(0, (0,))], data[Request(1, (1, 2))]])
    assert batch.image_index.tolist() == [[0, 1], [2, 3], [2, 3]]
    assert [name.rpartition("/")[2] for name in batch.images.names] == ["0.png", "1.png", "1.png", "2.png"]
    (tmp_path / "2.png").unlink()
    data = examples(data.dataset, tiny.tokenizer, skip_broken=True)
    example = data[Request(1, (1, 2))]  # photos 1 and 2; then 2 and 0; then 0 and 1
    assert [text.record["text_index"] for text in example.texts] == [0] and data.broken == {1, 2}


# Splits joined by "+" whose images have the same ids


def _box(number: int) -> list[int]:
    return [number, number, number + 10, number + 10]


def _joined_settings(root: Path, name: str, **files: str) -> DataConfig:
    """Two splits, a (0) and b (1), each with one text about the image(s) 1, whose boxes differ."""
    for number, split in enumerate("ab"):
        image = {"id": 1, "file_name": "1.jpg", "width": 50, "height": 40}
        caption = {"image_id": 1, "id": 1, "caption": f"text {split}"}
        question = {"question_id": number, "image_id": 1, "question": f"text {split}"}
        answer = {
            "question_id": number,
            "image_id": 1,
            "answers": [{"answer": "yes"}],
            "multiple_choice_answer": "yes",
            "answer_type": "yes/no",
            "question_type": "is",
        }
        x1, y1, x2, y2 = _box(number)
        annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
        categories = [{"id": 1, "name": "dog"}]
        write_json(root / f"captions_{split}.json", {"images": [image], "annotations": [caption]})
        write_json(root / f"questions_{split}.json", {"questions": [question]})
        write_json(root / f"answers_{split}.json", {"annotations": [answer]})
        write_json(
            root / f"instances_{split}.json", {"images": [image], "annotations": [annotation], "categories": categories}
        )
        listed = {"question_id": number, "img_id": "1", "sent": f"text {split}", "label": {"yes": 1}}
        write_json(root / f"listed_{split}.json", [listed])
        pair = {"identifier": f"{number}", "img0": "1", "img1": "1", "sent": f"text {split}", "label": 1}
        write_json(root / f"pairs_{split}.json", [pair])
        line = {"identifier": f"x-1-0-{number}", "sentence": f"text {split}", "label": "True"}
        write_json_lines(root / f"lines_{split}.json", [line])
        gqa = {"question": f"text {split}", "imageId": "1", "isBalanced": True}
        write_json(root / f"gqa_{split}.json", {f"{split}1": gqa})
        for image_id in ("1", "x-1-0-img0", "x-1-0-img1"):
            regions = RegionFeatures(image_id, (40, 50), np.array([_box(number)]), np.full((1, 2), number))
            save_npz(root / f"features_{split}" / f"{image_id}.npz", regions)
    shutil.copytree(root / "features_a", root / "features")
    keys = {
        "captions": {"captions": "captions_{split}.json", "instances": "instances_{split}.json"},
        "vqa": {
            "questions": "questions_{split}.json",
            "annotations": "answers_{split}.json",
            "instances": "instances_{split}.json",
        },
        "gqa": {"questions": "gqa_{split}.json", "instances": "instances_{split}.json"},
        "nlvr2": {"examples": "lines_{split}.json"},
        "scored_questions": {"questions": "listed_{split}.json"},
        "listed_pairs": {"examples": "pairs_{split}.json"},
    }[name]
    config = {"image_name": "{id}.jpg"} if name == "vqa" else {}
    defaults = {"images": "im_{split}", "detections": "features_{split}", "features": "features_{split}"}
    return msgspec.convert(
        {"name": name, "root": str(root), "files": {**defaults, **keys, **files}, "config": config}, DataConfig
    )


def _read_joined(settings: DataConfig, boxes: str, split: str = "a+b") -> list[tuple[list[str], list[float]]]:
    """The texts of each image, and the left side of its box."""
    source = BoxSource(boxes)
    dataset = open_dataset(DATASETS[settings.name].cls, settings, split, source, training=True)
    loader = make_loader(source, open_boxes_of(dataset, settings, source))
    loader.require_images(dataset.image_keys(), split)
    assert EncodedDataset(dataset, loader, PlainPreprocessor(None), seed=0).fingerprint()
    seen = []
    for group in dataset.groups:
        sample = dataset.sample(group)
        [left] = {float(loader.load(image, Augmentation(False, SAME)).boxes[0, 0]) for image in sample.images}
        seen.append(([text.words for text in sample.texts], left / 60 * 40))
    return seen


JOINED = ("captions", "vqa", "gqa", "nlvr2", "scored_questions", "listed_pairs")
APART = [(["text a"], 0.0), (["text b"], pytest.approx(1.0))]


@pytest.fixture
def photos(tmp_path) -> Path:
    for folder in ("im_a", "im_b", "im"):
        (tmp_path / folder).mkdir()
        for name in ("1.jpg", "1.png", "x-1-0-img0.png", "x-1-0-img1.png"):
            Image.new("RGB", (50, 40)).save(tmp_path / folder / name)
    return tmp_path


WITH_OBJECTS = ("captions", "vqa", "gqa")


@pytest.mark.parametrize(
    ("name", "boxes"),
    [
        *((name, "detections") for name in JOINED),
        *((name, "precomputed") for name in JOINED),
        *((name, "gt") for name in WITH_OBJECTS),
    ],
)
def test_images_of_joined_splits_may_have_the_same_ids(photos, name, boxes):
    folder = {"images": "im"} if name == "gqa" else {}  # GQA has one folder
    settings = _joined_settings(photos, name, **folder)
    assert _read_joined(settings, boxes) == APART
    part = {"name": name, "splits": {"all": "a+b"}, "files": settings.files, "config": settings.config}
    several = {"name": "joined", "root": settings.root, "config": {"datasets": {"one": part}}}
    assert _read_joined(msgspec.convert(several, DataConfig), boxes, "all") == APART


@pytest.mark.parametrize("name", JOINED)
def test_a_changed_text_or_box_changes_the_fingerprint(photos, name):
    boxes = "gt" if name in WITH_OBJECTS else "online"
    settings = _joined_settings(photos, name)

    def read() -> str:
        dataset = open_dataset(DATASETS[name].cls, settings, "a+b", boxes, training=True)
        return examples(dataset, PlainPreprocessor(None), boxes).fingerprint()

    seen = [read()]
    assert read() == seen[0]
    for old, new in (("text b", "text c"), ('"bbox": [1,', '"bbox": [2,')):
        for path in photos.glob("*_b.json"):
            path.write_text(path.read_text().replace(old, new))
        seen.append(read())
    assert len(set(seen)) == (3 if boxes == "gt" else 2)


@pytest.mark.parametrize("name", JOINED)
def test_the_same_id_in_the_same_files_is_the_same_image(photos, name):
    settings = _joined_settings(photos, name, images="im", detections="features")
    assert _read_joined(settings, "detections") == [(["text a", "text b"], 0.0)]


@pytest.mark.parametrize("name", [name for name in JOINED if name != "gqa"])
def test_two_images_with_one_id_in_a_shared_file_are_refused(photos, name):
    settings = _joined_settings(photos, name, detections="features")
    with refused("features", "of the split a", "of the split b", "data.files"):
        _read_joined(settings, "detections")


def test_joined_splits_need_the_same_categories(photos):
    settings = _joined_settings(photos, "captions")
    content = json.loads((photos / "instances_b.json").read_text())
    write_json(photos / "instances_b.json", content | {"categories": [{"id": 1, "name": "cat"}]})
    with refused("instances_b.json", "categories"):
        _read_joined(settings, "gt")
