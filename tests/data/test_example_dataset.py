"""Read, load, word: what holds for the examples of every data set."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from detector.config import SelectionRule
from e2e_vl.data.base import VLDataset
from e2e_vl.data.batching import ExampleDataset, Request, collate, random_generator
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.data.image_loader import open_boxes
from e2e_vl.data.tables import TextGroups
from e2e_vl.examples import GeneratorFactory, ImageExample, Preprocessor, TextExample
from e2e_vl.samples import Sample, SampleText
from e2e_vl.text import TextTokenizer
from tests.data.helpers import DOUBLE, SAME, examples, refused, words_of
from tests.data.tiny_readers import READERS, captions
from tests.data.tiny_refcoco import GT_7

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
        assert text.image_index == (0,)
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
        facts = dataset.sample([first.record["text_index"]]).texts[0].metadata
        assert facts.items() <= second.record.items(), "facts are about the stored image"


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


def test_workers_give_the_same_examples(dataset, tiny):
    data = examples(dataset, tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5)
    requests = [Request(0, (text,), epoch) for epoch in range(3) for text in dataset.groups[0]]
    loader = DataLoader(data, sampler=requests, batch_size=None, num_workers=2)
    for example, one in zip(loader, requests, strict=True):
        expected = data[one]
        np.testing.assert_array_equal(example.images[0].pixels, expected.images[0].pixels)
        assert [text.seed for text in example.texts] == [text.seed for text in expected.texts]
        assert [text.record for text in example.texts] == [text.record for text in expected.texts]


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
    with refused(image.locate().name, "data.skip_broken"):
        data[request(dataset, 1)]
    image.locate().unlink()
    with pytest.raises(FileNotFoundError, match=image.locate().name):
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
    image_transform = example.images[0].image_transform
    return image_transform.flipped, round(min(image_transform.size) / 60)


def test_nothing_but_broken_images_is_an_error(tiny):
    with pytest.raises(ValueError, match="20 images in a row cannot be read"):
        broken(tiny, 3, skip_broken=True)[Request(0, (0,))]
    dataset = captions(tiny)
    dataset.groups = TextGroups.consecutive([2])
    with pytest.raises(ValueError, match=r"seven\.png"):
        examples(dataset, tiny.tokenizer, skip_broken=True)[Request(0, (0,))]


def test_a_wrong_box_or_size_is_not_taken_for_a_broken_image(tiny):
    tiny.detections[1]["box"] = [101, 5, 10, 10]
    reader = open_boxes([tiny.write().detections_file], ALL, with_features=False)
    data = examples(captions(tiny), tiny.tokenizer, "detections", reader, skip_broken=True)
    with refused("dets.json: image 7", "box 1"):
        data[Request(0, (0,))]
    Image.new("RGB", (41, 80)).save(data.dataset.sample(data.groups[1]).images[0].locate())
    with refused("41 x 80", "40 x 80"):
        data[Request(1, (2,))]


# Random generators of texts


def test_a_preprocessor_draws_from_the_generator_of_its_text(tiny):
    dataset = captions(tiny)
    data = examples(dataset, tiny.tokenizer, seed=5)
    example = data[Request(1, (3, 2), 4)]
    assert [text.seed for text in example.texts] == [int(random_generator(5, 4, n).integers(99)) for n in (3, 2)]


class Sure(Preprocessor):
    """Two texts of each, the second about no image."""

    def encode_text(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], make_generator: GeneratorFactory
    ) -> Iterable[TextExample]:
        yield TextExample(self.text_tokenizer.single([]), text.image_index, self.record(text, images))
        yield TextExample(self.text_tokenizer.single([]), (), {})


def test_a_preprocessor_may_give_several_examples_of_a_text(tiny):
    data = examples(captions(tiny), Sure(TextTokenizer(tiny.tokenizer)))
    example = data[Request(1, (2, 3))]
    assert [text.image_index for text in example.texts] == [(0,), (), (0,), ()]
    assert words_of(example.texts[1], tiny.tokenizer) == ["[CLS]", "[SEP]"]
    batch = collate([example], (0, 0, 0), (1, 1, 1))
    assert torch.equal(batch.image_index, torch.tensor([[0], [-1], [0], [-1]]))
