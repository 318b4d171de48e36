"""What every reader promises: facts about the texts of one group, in words and in pixels of the stored image."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from e2e_vl.config import BoxSource
from e2e_vl.data.base import VLDataset
from e2e_vl.samples import BrokenImageError
from tests.data.helpers import examples
from tests.data.tiny_readers import READERS

BOXES = {7: [[10, 20, 30, 40], [60, 10, 90, 40], [0, 0, 100, 60]], 3: [[5.5, 10, 25.75, 70]]}
SIZES = {7: (60, 100), 3: (80, 40)}  # (height, width)


@pytest.fixture(params=READERS)
def dataset(request, tiny) -> VLDataset:
    return READERS[request.param](tiny)


def test_every_text_is_in_one_group(dataset):
    texts = [text for group in dataset.groups for text in group]
    assert sorted(texts) == list(range(len(dataset)))
    assert all(len(group) for group in dataset.groups)


def test_a_sample_states_the_facts(dataset):
    for group, image_id in zip(dataset.groups[:2], (7, 3), strict=True):
        sample = dataset.sample(group)
        [image] = sample.images
        assert isinstance(image.id, str)
        assert image.size == SIZES[image_id]
        assert image.locate().is_file()
        assert image.boxes is None and image.boxes_to_mask is None and image.candidates is None
        np.testing.assert_array_equal(image.objects.boxes, BOXES[image_id])
        assert image.objects.boxes.dtype == np.float64
        assert len(image.objects.classes) == len(image.objects) == len(BOXES[image_id])
        assert not sample.from_user
        assert [text.index for text in sample.texts] == list(group)
        for text in sample.texts:
            assert text.image_index == (0,)
            assert isinstance(text.words, str)
            assert text.metadata == json.loads(json.dumps(text.metadata))


def test_some_texts_of_a_group(dataset):
    whole = dataset.sample(dataset.groups[0])
    for number, index in enumerate(dataset.groups[0]):
        sample = dataset.sample([index])
        assert sample.images[0].id == whole.images[0].id
        [text] = sample.texts
        assert (text.index, text.words, text.metadata) == (
            index,
            whole.texts[number].words,
            whole.texts[number].metadata,
        )


def test_ids_of_images_are_those_of_the_samples(dataset):
    ids = list(dataset.image_ids())
    assert ids in ([], [dataset.sample(group).images[0].id for group in dataset.groups])


def test_the_truth_is_known_without_images_or_not_at_all(dataset):
    truths = list(dataset.truths())
    assert truths in ([], [dataset.sample([text]).texts[0].truth for text in range(len(dataset))])


def test_names_of_annotated_classes(dataset):
    assert list(dataset.class_names) == ["square", "box"]
    for group in dataset.groups:
        objects = dataset.sample(group).images[0].objects
        assert list(objects.names) == [dataset.class_names[number] for number in objects.classes]
    dataset.check_classes(2)
    with pytest.raises(ValueError, match=r"2 categories, but the detector has 1 classes; set MODEL\.ROI_HEADS"):
        dataset.check_classes(1)


def test_a_copy_in_another_process_states_the_same(dataset):
    copy = pickle.loads(pickle.dumps(dataset))
    group = dataset.groups[0]
    assert copy.sample(group).images[0].id == dataset.sample(group).images[0].id
    assert [text.metadata for text in copy.sample(group).texts] == [
        text.metadata for text in dataset.sample(group).texts
    ]


def test_a_missing_image_is_found_out_when_it_is_loaded(dataset, tiny):
    image = dataset.sample(dataset.groups[1]).images[0]
    image.locate().unlink()
    stated = dataset.sample(dataset.groups[1]).images[0]
    loader = examples(dataset, tiny.tokenizer, BoxSource.ONLINE).loader
    with pytest.raises(BrokenImageError) as caught:
        loader.load(stated, loader.draw_augmentation(np.random.default_rng(0)))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert f"the file of image {image.id} is missing" in str(caught.value.__cause__)
