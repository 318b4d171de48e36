"""Read, load, word: what holds for the examples of every data set, and the road of one with its own kind of ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from detector.selection import SelectionRule
from e2e_vl.data.base import VLDataset
from e2e_vl.data.formats.coco import read_instances
from e2e_vl.data.images.candidates import open_boxes
from e2e_vl.data.loading.batches import BatchLoader
from e2e_vl.data.loading.collate import collate
from e2e_vl.data.loading.example_dataset import ExampleDataset
from e2e_vl.data.loading.grouping import ConsecutiveGroups, GroupedBatchSampler
from e2e_vl.data.loading.requests import Request, random_generator
from e2e_vl.data.storage.features.record import RegionFeatures, save_npz
from e2e_vl.examples import ImageExample, TextExample
from e2e_vl.layout import TextWriter
from e2e_vl.samples import AnnotatedObjects, Sample, SampleImage, SampleText
from e2e_vl.wording import Draw, Wording
from tests.data.roads import DOUBLE, SAME, examples, words_of
from tests.data.tiny_readers import READERS, captions
from tests.data.tiny_refcoco import GT_7

GT_3 = [[5.5, 10, 25.75, 70]]
ALL = SelectionRule(min_score=0.0, min_regions=0, max_regions=100)


@pytest.fixture(params=READERS)
def dataset(request, tiny) -> VLDataset:
    return READERS[request.param](tiny)


def request(dataset: VLDataset, group: int = 0, epoch: int = 0) -> Request:
    return Request(group, tuple(dataset.groups[group]), epoch)


# Every reader


def test_one_image_with_all_its_texts(dataset, tiny):
    data = examples(dataset, tiny.tokenizer, with_objects=True)
    assert len(data) == len(dataset) and data.groups == dataset.groups
    example = data[request(dataset)]
    [image] = example.images
    np.testing.assert_array_equal(image.boxes, GT_7)
    assert image.objects.boxes.shape[1] == 4
    assert [text.record["text_index"] for text in example.texts] == list(dataset.groups[0])
    for text in example.texts:
        assert text.looks_at == (0,)
        assert text.record == json.loads(json.dumps(text.record))
        assert text.record["file_name"] == image.name
        assert text.record["image_size"] == [60, 100]
        assert text.record["flipped"] is False


def test_a_flip_moves_pixels_boxes_and_objects(dataset, tiny):
    plain, mirrored = (
        examples(dataset, tiny.tokenizer, with_objects=True, mask_size=14, flip_probability=flip)[request(dataset)]
        for flip in (0.0, 1.0)
    )
    one, other = plain.images[0], mirrored.images[0]
    np.testing.assert_array_equal(other.pixels, one.pixels[:, ::-1])
    np.testing.assert_array_equal(other.boxes, [[69, 20, 89, 40], [9, 10, 39, 40], [0, 0, 99, 59]])
    np.testing.assert_array_equal(other.objects.boxes[:2], [[70, 20, 90, 40], [10, 10, 40, 40]])
    if one.roi_masks is not None:
        np.testing.assert_array_equal(other.roi_masks, one.roi_masks[:, :, ::-1])
    assert {text.record["flipped"] for text in mirrored.texts} == {True}
    for first, second in zip(plain.texts, mirrored.texts, strict=True):
        facts = dataset.sample([first.record["text_index"]]).texts[0].facts
        assert facts.items() <= second.record.items(), "facts stay those of the stored image"


def test_randomness_depends_on_seed_epoch_and_text_only(dataset, tiny):
    def draws(seed: int) -> list[tuple[bool, int, int]]:
        data = examples(dataset, tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5, seed=seed)
        requests = [Request(0, (text,), epoch) for epoch in range(12) for text in dataset.groups[0]]
        made = [data[one] for one in requests]
        again = [data[one].images[0].pixels for one in reversed(requests)]
        for example, pixels in zip(made, reversed(again), strict=True):
            np.testing.assert_array_equal(example.images[0].pixels, pixels)
        return [(e.texts[0].record["flipped"], e.images[0].pixels.shape[0], e.texts[0].seed) for e in made]

    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert {row[:2] for row in first} == {(flipped, height) for flipped in (False, True) for height in (60, 120)}


def test_all_texts_of_a_request_share_one_image(dataset, tiny):
    data = examples(dataset, tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5)
    for epoch in range(4):
        example = data[request(dataset, epoch=epoch)]
        assert len(example.images) == 1
        assert len({text.record["flipped"] for text in example.texts}) == 1


def test_workers_give_the_same_examples(dataset, tiny):
    data = examples(dataset, tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5)
    requests = [Request(0, (text,), epoch) for epoch in range(3) for text in dataset.groups[0]]
    loader = DataLoader(data, sampler=requests, batch_size=None, num_workers=2)
    for example, one in zip(loader, requests, strict=True):
        expected = data[one]
        np.testing.assert_array_equal(example.images[0].pixels, expected.images[0].pixels)
        assert [text.seed for text in example.texts] == [text.seed for text in expected.texts]
        assert [text.record for text in example.texts] == [text.record for text in expected.texts]


def test_blank_controls(dataset, tiny):
    data = examples(dataset, tiny.tokenizer, is_blank=True, blank_boxes=True, mask_size=14)
    [image] = data[request(dataset)].images
    assert image.boxes.shape == (0, 4)
    assert np.unique(image.pixels.reshape(-1, 3), axis=0).tolist() == [[103, 116, 123]]


def test_files_of_boxes_know_images_by_their_ids(dataset, tiny, tmp_path):
    boxes = np.array([[0, 0, 10, 10], [5, 5, 20, 20]], dtype=np.float32)
    for group in dataset.groups:
        [image] = dataset.sample(group).images
        path = tmp_path / "features" / f"{image.id}.npz"
        path.parent.mkdir(exist_ok=True)
        save_npz(path, RegionFeatures(image.id, image.size, boxes, np.eye(2, 4, dtype=np.float32)))
    reader = open_boxes([tmp_path / "features"], ALL, with_features=True)
    reader.require_images(dataset.image_ids(), "train")
    data = examples(dataset, tiny.tokenizer, "precomputed", reader)
    batch = collate([data[request(dataset, group)] for group in range(len(dataset.groups))], (0, 0, 0), (1, 1, 1))
    assert [rows.shape for rows in batch.images.precomputed.features] == [(2, 4)] * len(dataset.groups)
    np.testing.assert_array_equal(batch.boxes[0], boxes)
    assert len(batch) == len(dataset)


def test_an_image_that_is_missing_or_broken_is_named(dataset, tiny):
    [image] = dataset.sample(dataset.groups[1]).images
    data = examples(dataset, tiny.tokenizer)
    good = image.locate().read_bytes()
    image.locate().write_bytes(good[:60])
    with pytest.raises(ValueError, match=rf"{image.locate().name}.*skip_broken=true"):
        data[request(dataset, 1)]
    image.locate().unlink()
    with pytest.raises(FileNotFoundError, match=rf"the file of image {image.id} is missing.*skip_broken=true"):
        data[request(dataset, 1)]


def test_an_image_of_another_size_is_never_skipped(dataset, tiny):
    Image.new("RGB", (41, 80)).save(dataset.sample(dataset.groups[1]).images[0].locate())
    data = examples(dataset, tiny.tokenizer, skip_broken=True)
    with pytest.raises(ValueError, match="is 41 x 80 pixels, but its annotation file says 40 x 80"):
        data[request(dataset, 1)]


# Broken images may be skipped


def broken(tiny, number: int, **options) -> ExampleDataset:
    """Three photos with two captions each; the first `number` photos are damaged."""
    for row in tiny.instances["images"][:number]:
        path = tiny.images_root / row["file_name"]
        path.write_bytes(path.read_bytes()[:60])
    return examples(captions(tiny), tiny.tokenizer, **options)


def test_broken_images_may_be_replaced_but_never_in_silence(tiny, caplog):
    data = broken(tiny, 2, skip_broken=True)
    with caplog.at_level(logging.WARNING):
        example = data[Request(0, (0, 1))]
    assert [text.record["image_id"] for text in example.texts] == ["9", "9"]
    assert [text.record["text_index"] for text in example.texts] == [4, 5]
    np.testing.assert_array_equal(example.images[0].boxes, [[0, 0, 30, 59], [30, 0, 59, 59]])
    assert data.broken == {0, 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "seven.png" in caplog.text
    assert "The next image takes its place (2 unreadable images so far" in caplog.text
    assert len(data[Request(0, (1,))].texts) == 1, "as many texts as were asked for"
    assert data[Request(2, (4,))].texts[0].record["text_index"] == 4
    with pytest.raises(ValueError, match=r"seven\.png"):
        broken(tiny, 0)[Request(0, (0,))]


def test_the_replacement_looks_as_the_broken_image_would_have(tiny):
    options = {"resize": (SAME, DOUBLE), "flip_probability": 0.5}
    whole = examples(captions(tiny), tiny.tokenizer, **options)
    looks = [data_look(whole[Request(0, (0,), epoch)]) for epoch in range(8)]
    data = broken(tiny, 1, skip_broken=True, **options)
    assert [data_look(data[Request(0, (0,), epoch)]) for epoch in range(8)] == looks
    assert len(set(looks)) > 2


def data_look(example) -> tuple[bool, float]:
    placement = example.images[0].placement
    return placement.flipped, round(min(placement.size) / 60)


def test_nothing_but_broken_images_is_an_error(tiny):
    with pytest.raises(ValueError, match="20 images in a row cannot be read, the last is image 3; check where"):
        broken(tiny, 3, skip_broken=True)[Request(0, (0,))]
    dataset = captions(tiny)
    dataset.groups = ConsecutiveGroups([2])
    with pytest.raises(ValueError, match=r"seven\.png"):
        examples(dataset, tiny.tokenizer, skip_broken=True)[Request(0, (0,))]


def test_a_wrong_box_is_not_taken_for_a_broken_image(tiny):
    tiny.detections[1]["box"] = [101, 5, 10, 10]
    reader = open_boxes([tiny.write().detections_file], ALL, with_features=False)
    data = examples(captions(tiny), tiny.tokenizer, "detections", reader, skip_broken=True)
    with pytest.raises(ValueError, match=r"dets\.json: image 7: box 1 .* outside the 100 x 60 image"):
        data[Request(0, (0,))]


# Random generators of texts


def test_generators_of_texts_depend_on_nothing_else():
    draws = {key: random_generator(*key).random() for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}
    assert len(set(draws.values())) == 4
    assert all(random_generator(*key).random() == value for key, value in draws.items())


def test_a_wording_draws_from_the_generator_of_its_text(tiny):
    """And the image's draws come first: flip, then size, of the first text."""
    dataset = captions(tiny)
    data = examples(dataset, tiny.tokenizer, seed=5)
    example = data[Request(1, (3, 2), 4)]
    assert [text.seed for text in example.texts] == [int(random_generator(5, 4, n).integers(99)) for n in (3, 2)]


# A data set with its own kind of ids, and pairs of images


class Album(VLDataset):
    """Photos with names as ids; each text compares a photo with the next one."""

    known_files = ("images",)
    ids = ("holiday/one red", "holiday/zwei", "x")

    def __init__(self, folder: Path, *, pairs: bool = False) -> None:
        self.folder = folder
        self.pairs = pairs
        self.groups = [[0], [1, 2], [3]]
        self.parts = [{}]

    @classmethod
    def open(cls, files, options, split, wants):
        return cls(files.path("images"))

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
        looks_at = (0, 1) if self.pairs else (0,)
        stated = (SampleText(text, f"red square {text}", {"id": self.ids[group]}, None, looks_at) for text in texts)
        return Sample(tuple(self._image(number) for number in numbers), tuple(stated))

    def _image(self, number: int) -> SampleImage:
        objects = AnnotatedObjects(np.array([[0.0, 0, 10 + number, 10]]), f"album {number}", np.array([number]))
        return SampleImage(self.ids[number], self.folder / f"{number}.png", (20, 30 + number), objects)


@pytest.fixture
def album(tmp_path) -> Path:
    for number in range(3):
        Image.new("RGB", (30 + number, 20), (9 * number, 0, 0)).save(tmp_path / f"{number}.png")
    return tmp_path


def batches(data: ExampleDataset, workers: int = 0) -> list:
    joined = partial(collate, pixel_mean=(0, 0, 0), pixel_std=(1, 1, 1))
    sampler = GroupedBatchSampler(data.groups, 2, shuffle=False)
    return list(BatchLoader(data, sampler, joined, workers=workers))


@pytest.mark.parametrize("source", ["gt", "detections", "detections+gt", "online", "precomputed"])
def test_ids_of_images_may_be_any_text(album, tiny, source):
    boxes = np.array([[1, 2, 9, 8]], dtype=np.float32)
    rows = [{"image_id": name, "box": [1, 2, 8, 6], "category_id": 1, "score": 0.9} for name in Album.ids]
    (album / "dets.json").write_text(json.dumps(rows))
    for number, name in enumerate(Album.ids):
        path = album / "features" / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_npz(path, RegionFeatures(name, (20, 30 + number), boxes, np.full((1, 4), number, dtype=np.float32)))
    file = {"precomputed": "features", "gt": None, "online": None}.get(source, "dets.json")
    reader = None if file is None else open_boxes([album / file], ALL, with_features=source == "precomputed")
    data = examples(Album(album), tiny.tokenizer, source, reader, resize=SAME)
    data.loader.require_images(data.dataset.image_ids(), "train")
    for workers in (0, 1):
        first, second = batches(data, workers)
        assert [record["id"] for record in first.records] == ["holiday/one red", "holiday/zwei", "holiday/zwei"]
        assert first.looks_at.tolist() == [[0], [1], [1]] and second.looks_at.tolist() == [[0]]
        if source == "online":
            assert first.boxes is None
        else:
            assert [len(rows) for rows in first.boxes] == [2 if source == "detections+gt" else 1] * 2
        if source == "precomputed":
            assert [float(rows[0, 0]) for rows in first.images.precomputed.features] == [0, 1]


def test_instances_and_captions_with_ids_that_are_texts(album, tiny):
    """COCO's own readers take them too."""
    tiny.images_root.mkdir(exist_ok=True)
    for row in tiny.instances["images"]:
        row["id"] = f"photo {row['id']}"
    for row in tiny.instances["annotations"]:
        row["image_id"] = f"photo {row['image_id']}"
    tiny.write()
    assert read_instances(tiny.instances_file).objects("photo 7").ids == (100, 101, 102)
    for make in (READERS["captions"], READERS["coco_detection"], READERS["vcr"]):
        dataset = make(tiny)
        np.testing.assert_array_equal(examples(dataset, tiny.tokenizer)[request(dataset)].images[0].boxes, GT_7)


def test_a_text_may_look_at_two_images(album, tiny):
    data = examples(Album(album, pairs=True), tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5)
    for epoch in range(6):
        example = data[Request(1, (1, 2), epoch)]
        one, other = example.images
        assert one.placement.flipped == other.placement.flipped, "both images of a pair look alike"
        assert one.pixels.shape[0] == other.pixels.shape[0]
        assert (one.box_classes.tolist(), other.box_classes.tolist()) == ([1], [2])
    batch = batches(data)[0]
    assert batch.looks_at.tolist() == [[0, 1], [2, 3], [2, 3]]
    assert [name.rpartition("/")[2] for name in batch.images.names] == ["0.png", "1.png", "1.png", "2.png"]


def test_of_a_pair_each_broken_image_counts(album, tiny):
    (album / "2.png").unlink()
    data = examples(Album(album, pairs=True), tiny.tokenizer, skip_broken=True)
    example = data[Request(1, (1, 2))]  # photos 1 and 2; then 2 and 0; then 0 and 1
    assert [text.record["text_index"] for text in example.texts] == [0]
    assert data.broken == {1, 2}


class Sure(Wording):
    """Two texts of each, the second about no image."""

    def word(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], draw: Draw
    ) -> Iterable[TextExample]:
        yield TextExample(self.writer.single([]), text.looks_at, self.record(text, images))
        yield TextExample(self.writer.single([]), (), {})


def test_a_wording_may_give_several_examples_of_a_text(album, tiny):
    data = examples(Album(album), Sure(TextWriter(tiny.tokenizer)))
    example = data[Request(1, (1, 2))]
    assert [text.looks_at for text in example.texts] == [(0,), (), (0,), ()]
    assert words_of(example.texts[1], tiny.tokenizer) == ["[CLS]", "[SEP]"]
    batch = collate([example], (0, 0, 0), (1, 1, 1))
    assert torch.equal(batch.looks_at, torch.tensor([[0], [-1], [0], [-1]]))
