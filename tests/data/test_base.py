"""Files and options of the settings, what every data set promises, and texts about two images."""

from __future__ import annotations

import functools
import json
import pickle
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detector.errors import UserError
from e2e_vl.config import DataSettings
from e2e_vl.data.base import DataFiles, VLDataset
from e2e_vl.data.batching import Request, collate
from e2e_vl.samples import AnnotatedObjects, Sample, SampleImage, SampleText
from tests.data.helpers import DOUBLE, SAME, examples

KNOWN = ("images", "captions", "corpus")
BOXES = {7: [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 100, 60]], 3: [[5.5, 10, 25.75, 70]]}
SIZES = {7: (60, 100), 3: (80, 40)}  # (height, width)


def test_names_of_files_have_placeholders_and_start_from_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {"captions": "cc/{split}.json", "images": "/elsewhere/{images}", "corpus": "a.doc+{split}.doc"}
    found = DataFiles(DataSettings(name="captions", root="~/data", files=files), KNOWN)
    assert found.path("captions", split="val") == tmp_path / "data" / "cc" / "val.json"
    assert found.path("images", split="val", images="val2014") == Path("/elsewhere/val2014")
    assert found.name("corpus", split="val") == "a.doc+val.doc"
    assert "corpus" in found and "instances" not in found


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
            [own] = alone[text.index].texts
            assert (own.words, own.metadata, own.image_index) == (text.words, text.metadata, (0,))
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
        own = (SampleText(text, f"red square {text}", {}, None, (0, 1)) for text in texts)
        return Sample((self._image(group), self._image((group + 1) % 3)), tuple(own))

    def _image(self, number: int) -> SampleImage:
        objects = AnnotatedObjects(np.array([[0.0, 0, 10 + number, 10]]), f"album {number}", np.array([number]))
        return SampleImage(str(number), self.folder / f"{number}.png", (20, 30 + number), objects)


def test_a_text_may_be_about_two_images(tmp_path, tiny):
    for number in range(3):
        Image.new("RGB", (30 + number, 20)).save(tmp_path / f"{number}.png")
    data = examples(Album(tmp_path), tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5)
    for epoch in range(6):
        example = data[Request(1, (1, 2), epoch)]
        one, other = example.images
        assert one.image_transform.flipped == other.image_transform.flipped, "both images of a pair are augmented alike"
        assert one.pixels.shape[0] == other.pixels.shape[0]
        assert (one.box_classes.tolist(), other.box_classes.tolist()) == ([1], [2])
    batch = collate([data[Request(0, (0,))], data[Request(1, (1, 2))]])
    assert batch.image_index.tolist() == [[0, 1], [2, 3], [2, 3]]
    assert [name.rpartition("/")[2] for name in batch.images.names] == ["0.png", "1.png", "1.png", "2.png"]
    (tmp_path / "2.png").unlink()
    data = examples(data.dataset, tiny.tokenizer, skip_broken=True)
    example = data[Request(1, (1, 2))]  # photos 1 and 2; then 2 and 0; then 0 and 1
    assert [text.record["text_index"] for text in example.texts] == [0] and data.broken == {1, 2}
