"""A reader of one's own: photos with any text as id, boxes from every source, texts about two photos."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detector.config import SelectionRule
from e2e_vl.data.base import VLDataset
from e2e_vl.data.batching import BatchLoader, ExampleDataset, GroupedBatchSampler, Request, collate
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.config import NoOptions
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.data.image_loader import open_boxes
from e2e_vl.parts import DATASETS, Part
from e2e_vl.run.build import build_collate, build_examples, build_model, build_tokenizer
from e2e_vl.samples import AnnotatedObjects, Sample, SampleImage, SampleText
from tests.data.helpers import DOUBLE, SAME, examples
from tests.data.tiny_readers import READERS
from tests.data.tiny_refcoco import GT_7

ALL = SelectionRule(min_score=0.0, min_regions=0, max_regions=100)
BOX = np.array([[1, 2, 9, 8]], dtype=np.float32)


class Album(VLDataset):
    """Photos with names as ids; each text compares a photo with the next one."""

    file_keys = ("images", "instances", "refs", "detections")
    ids = ("holiday/one red", "holiday/zwei", "x")

    def __init__(self, folder: Path, *, pairs: bool = False) -> None:
        self.folder = folder
        self.pairs = pairs
        self.groups = [[0], [1, 2], [3]]
        self.parts = [{}]

    @classmethod
    def texts_of(cls, files, options, split):
        return ["red square"]

    def __len__(self) -> int:
        return 4

    def image_ids(self) -> Iterable[str]:
        return self.ids

    def sample(self, texts: Sequence[int]) -> Sample:
        group = next(number for number, group in enumerate(self.groups) if texts[0] in group)
        numbers = (group, (group + 1) % 3) if self.pairs else (group,)
        image_index = (0, 1) if self.pairs else (0,)
        stated = (SampleText(text, f"red square {text}", {"id": self.ids[group]}, None, image_index) for text in texts)
        return Sample(tuple(self._image(number) for number in numbers), tuple(stated))

    def _image(self, number: int) -> SampleImage:
        objects = AnnotatedObjects(np.array([[0.0, 0, 10 + number, 10]]), f"album {number}", np.array([number]))
        return SampleImage(self.ids[number], self.folder / f"{number}.png", (20, 30 + number), objects)


@pytest.fixture
def album(tmp_path) -> Path:
    folder = tmp_path / "album"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (30 + number, 20), (9 * number, 0, 0)).save(folder / f"{number}.png")
    rows = [{"image_id": name, "box": [1, 2, 8, 6], "category_id": 1, "score": 0.9} for name in Album.ids]
    (folder / "dets.json").write_text(json.dumps(rows))
    return folder


def batches(data: ExampleDataset, workers: int = 0) -> list:
    joined = partial(collate, pixel_mean=(0, 0, 0), pixel_std=(1, 1, 1))
    sampler = GroupedBatchSampler(data.groups, 2, shuffle=False)
    return list(BatchLoader(data, sampler, joined, workers=workers))


@pytest.mark.parametrize("source", ["gt", "detections", "detections+gt", "online", "precomputed"])
def test_ids_of_images_may_be_any_text(album, tiny, source):
    for number, name in enumerate(Album.ids):
        path = album / "features" / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_npz(path, RegionFeatures(name, (20, 30 + number), BOX, np.full((1, 4), number, dtype=np.float32)))
    file = {"precomputed": "features", "gt": None, "online": None}.get(source, "dets.json")
    reader = None if file is None else open_boxes([album / file], ALL, with_features=source == "precomputed")
    data = examples(Album(album), tiny.tokenizer, source, reader, resize=SAME)
    data.loader.require_images(data.dataset.image_ids(), "train")
    for workers in (0, 1):
        first, second = batches(data, workers)
        assert [record["id"] for record in first.records] == ["holiday/one red", "holiday/zwei", "holiday/zwei"]
        assert first.image_index.tolist() == [[0], [1], [1]] and second.image_index.tolist() == [[0]]
        if source == "online":
            assert first.boxes is None
        else:
            assert [len(rows) for rows in first.boxes] == [2 if source == "detections+gt" else 1] * 2
        if source == "precomputed":
            assert [float(rows[0, 0]) for rows in first.images.precomputed.features] == [0, 1]


def test_instances_and_captions_with_ids_that_are_texts(tiny):
    """COCO's own readers take them too."""
    for row in tiny.instances["images"]:
        row["id"] = f"photo {row['id']}"
    for row in tiny.instances["annotations"]:
        row["image_id"] = f"photo {row['image_id']}"
    tiny.write()
    assert CocoInstances(tiny.instances_file).objects("photo 7").ids == (100, 101, 102)
    for make in (READERS["captions"], READERS["coco_detection"], READERS["vcr"]):
        dataset = make(tiny)
        np.testing.assert_array_equal(examples(dataset, tiny.tokenizer)[Request(0, (0,))].images[0].boxes, GT_7)


def test_a_text_may_look_at_two_images(album, tiny):
    data = examples(Album(album, pairs=True), tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5)
    for epoch in range(6):
        example = data[Request(1, (1, 2), epoch)]
        one, other = example.images
        assert one.image_transform.flipped == other.image_transform.flipped, "both images of a pair look alike"
        assert one.pixels.shape[0] == other.pixels.shape[0]
        assert (one.box_classes.tolist(), other.box_classes.tolist()) == ([1], [2])
    batch = batches(data)[0]
    assert batch.image_index.tolist() == [[0, 1], [2, 3], [2, 3]]
    assert [name.rpartition("/")[2] for name in batch.images.names] == ["0.png", "1.png", "1.png", "2.png"]


def test_of_a_pair_each_broken_image_counts(album, tiny):
    (album / "2.png").unlink()
    data = examples(Album(album, pairs=True), tiny.tokenizer, skip_broken=True)
    example = data[Request(1, (1, 2))]  # photos 1 and 2; then 2 and 0; then 0 and 1
    assert [text.record["text_index"] for text in example.texts] == [0]
    assert data.broken == {1, 2}


class OpenedAlbum(Album):
    def __init__(self, files, options, split, needs) -> None:
        super().__init__(files.path("images"))


@pytest.mark.parametrize("boxes", ["gt", "detections", "online"])
def test_the_whole_road_from_settings_to_answers(album, tiny_config, monkeypatch, boxes):
    monkeypatch.setitem(DATASETS, "album", Part(NoOptions, OpenedAlbum))
    config = tiny_config(
        "data.name=album", f"data.root={album}", "data.files.images=.", "data.files.detections=dets.json"
    )
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer).eval()
    data = build_examples(config, model, tokenizer, "val", boxes=boxes)
    batch = build_collate(config, model)([data[Request(0, (0,))], data[Request(1, (1, 2))]])
    with torch.no_grad():
        records = model.task.predict(batch, model(batch))
    assert [record.metadata["id"] for record in records] == ["holiday/one red", "holiday/zwei", "holiday/zwei"]
    assert [record.text_index for record in records] == [0, 1, 2]
    if boxes == "detections":
        np.testing.assert_allclose([record.box for record in records], np.repeat(BOX, 3, axis=0), atol=1e-4)
