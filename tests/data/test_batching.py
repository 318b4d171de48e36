"""Batches from a data set: sampling, loading examples, workers and collating."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from detector.errors import UserError
from e2e_vl.data.batching import (
    BatchLoader,
    EncodedDataset,
    GroupedBatchSampler,
    Request,
    collate,
    pack,
    pad_texts,
    random_generator,
    unpack,
)
from e2e_vl.data.image_loader import MEAN_COLOUR
from e2e_vl.data.tables import TextGroups
from e2e_vl.preprocessing import EncodedSample, EncodedText
from e2e_vl.targets import Targets, stacked
from e2e_vl.text import TextEncoding
from e2e_vl.transforms import DetectionObjects, ImageTransform, LoadedImage
from tests.conftest import ROOT
from tests.data.helpers import DOUBLE, SAME, examples, plain, read_by_processes, refused
from tests.data.tiny_readers import captions
from tests.data.tiny_refcoco import GT_7

GROUPS = [[0, 1, 2, 3, 4], [5], [6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16, 17], [18, 19, 20]]
TEXTS = list(range(21))
ORDER_IN_PAIRS = [2, 5, 3, 4, 6, 15, 1, 9, 2, 5]
ORDER_OF_IMAGES = [3, 0, 2, 1, 4, 6, 7, 13, 14, 8, 10, 11, 12, 9, 16, 17, 15, 5, 20, 18, 19]


def make(*arguments, epoch: int = 0, start_batch: int = 0, **options) -> GroupedBatchSampler:
    sampler = GroupedBatchSampler(*arguments, **options)
    sampler.set_epoch(epoch, start_batch)
    return sampler


def texts_of(batches) -> list[int]:
    return [text for batch in batches for request in batch for text in request.texts]


@pytest.mark.parametrize("texts_per_image", [1, 2, 3, None])
def test_every_text_once_an_epoch_and_only_the_last_batch_is_filled_up(texts_per_image):
    sampler = make(GROUPS, 4, texts_per_image, seed=3)
    batches = list(sampler)
    requests = [request for batch in batches for request in batch]
    once, filling = requests[: sampler.num_groups], requests[sampler.num_groups :]
    assert sorted(text for request in once for text in request.texts) == TEXTS
    assert filling == requests[: len(filling)]
    assert {len(batch) for batch in batches} == {4}
    assert len(filling) < 4
    for request in requests:
        assert set(request.texts) <= set(GROUPS[request.group])
        assert len(request.texts) <= (texts_per_image or 99)


def test_accumulation_fills_up_the_last_step_and_leaves_the_order():
    whole = make(GROUPS, 6, 2, seed=4, epoch=3)
    parts = make(GROUPS, 2, 2, seed=4, epoch=3, gradient_accumulation_steps=3)
    assert whole.num_groups % 6, "the last batch should need filling"
    assert len(parts) == 3 * len(whole)
    assert [request for batch in parts for request in batch] == [request for batch in whole for request in batch]
    evaluation = make(GROUPS, 2, 2, shuffle=False, gradient_accumulation_steps=3)
    assert texts_of(evaluation) == TEXTS


def of_ranks(world_size: int, images_per_batch: int, **options) -> list[GroupedBatchSampler]:
    return [
        make(GROUPS, images_per_batch, 2, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_batches_of_all_ranks_joined_are_those_of_one_process(world_size):
    options = {"seed": 5, "epoch": 2}
    one = list(make(GROUPS, 6, 2, **options))
    parts = [list(sampler) for sampler in of_ranks(world_size, 6, **options)]
    assert {len(part) for part in parts} == {len(one)}
    assert {len(batch) for part in parts for batch in part} == {6 // world_size}
    assert [[request for part in parts for request in part[number]] for number in range(len(one))] == one


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_evaluation_deals_whole_batches_and_repeats_nothing(world_size):
    one = list(make(GROUPS, 3, 2, shuffle=False))
    assert texts_of(one) == TEXTS
    assert [len(batch) for batch in one] == [3, 3, 3, 3, 1]
    for start in range(len(one) + 1):  # counted in batches of all ranks
        samplers = of_ranks(world_size, 3, shuffle=False, start_batch=start)
        dealt = [list(sampler) for sampler in samplers]
        assert [len(batches) for batches in dealt] == [len(sampler) for sampler in samplers]
        assert sorted(text for batches in dealt for text in texts_of(batches)) == texts_of(one[start:])
        if start == 0:
            assert dealt == [one[rank::world_size] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_gives_the_rest_of_the_epoch(world_size):
    options = {"seed": 9, "rank": world_size - 1, "world_size": world_size, "epoch": 1}
    full = list(make(GROUPS, 4, 2, **options))
    for start in range(len(full) + 1):
        rest = make(GROUPS, 4, 2, start_batch=start, **options)
        assert list(rest) == full[start:]
        assert len(rest) == len(full) - start
    rest.set_epoch(1)
    assert list(rest) == full


def test_the_order_stays_what_it_always_was():
    """Runs can be resumed and repeated with later versions."""
    groups = TextGroups.of_lists([[3, 1, 4, 15], [9], [], [2, 6, 5]])
    sampler = make(groups, 2, 2, seed=1, epoch=2)
    assert texts_of(sampler) == ORDER_IN_PAIRS
    for request in (request for batch in sampler for request in batch):
        assert request.epoch == 2
        assert set(request.texts) <= set(groups[request.group]), "a group without texts keeps its number"
        assert {type(number) for number in (request.group, *request.texts)} == {int}
    assert texts_of(make(GROUPS, 3, None, seed=7, epoch=1)) == ORDER_OF_IMAGES


@pytest.mark.parametrize(("shuffle", "images_per_batch"), [(True, 2), (False, 1)])
def test_two_processes_with_two_workers_read_every_text_once(dataset, shuffle, images_per_batch):
    """Of every kind of data set; an epoch of training is filled up to whole batches."""
    found = read_by_processes(dataset, images_per_batch, texts_per_image=1, shuffle=shuffle)
    counts = Counter(text for _, _, text, _ in found)
    assert sorted(counts) == list(range(len(dataset)))
    assert len(found) == len(dataset) + -len(dataset) % images_per_batch
    assert len({one[:2] for one in found}) == min(4, len(found)), "every worker reads"


THREE_GROUPS = [[0, 1], [2], [3, 4, 5]]


@dataclasses.dataclass
class Echo:
    """Answers a request with its texts."""

    broken: int | None = None  # a text that cannot be read
    error: type[Exception] = FileNotFoundError

    def __getitem__(self, request):
        if self.broken in request.texts:
            raise self.error(f"photo_{self.broken}.jpg is missing")
        return request.texts


def echo_loader(dataset, workers: int, **options) -> BatchLoader:
    sampler = GroupedBatchSampler(THREE_GROUPS, 2, 1, shuffle=False)
    return BatchLoader(dataset, sampler, list, workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_the_order_of_the_sampler_draw_no_seed_from_the_generator_of_the_model(workers):
    before = torch.random.get_rng_state()
    batches = echo_loader(Echo(), workers)
    assert len(batches) == 3
    for _ in range(2):
        assert list(batches) == [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)]]
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [FileNotFoundError, ValueError])
def test_an_error_about_the_data_is_raised_as_it_was(workers, error):
    seen = []
    with pytest.raises(error) as caught:
        seen += echo_loader(Echo(3, error), workers)
    assert str(caught.value) == "photo_3.jpg is missing", "and no traceback of a worker"
    del caught  # its traceback keeps the loader
    iterator = iter(echo_loader(Echo(3, error), workers))
    assert next(iterator) == [(0,), (1,)], "the batches before it are whole"


ABANDONED = """
from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler
from tests.data.test_batching import THREE_GROUPS, Echo
iterator = iter(BatchLoader(Echo(), GroupedBatchSampler(THREE_GROUPS, 2, 1, shuffle=False), list, workers=2))
next(iterator)  # it lives to the end of the process
"""


def test_a_process_ends_although_its_workers_ignore_sigterm():
    subprocess.run([sys.executable, "-c", ABANDONED], cwd=ROOT, check=True, timeout=120)


def test_packing_changes_nothing():
    same = torch.arange(3)
    value = {
        "pixels": torch.rand(2, 300, 600),
        "rows": [torch.zeros(0, 4), torch.ones(2, 4).T, torch.tensor(True), torch.zeros(0, 4, dtype=torch.int64)],
        "same": [same, same],
        "plain": [("a", None), 1.5],
    }
    packed = pack(value)
    assert len(packed.large) == 1 and packed.large[0] is value["pixels"], "pixels are not copied"
    found = unpack(packed)
    assert torch.equal(found.pop("pixels"), value.pop("pixels"))  # as lists they take seconds to compare
    assert plain(found) == plain(value)
    assert found["same"][0] is found["same"][1]
    assert plain(unpack(pack({"no": "tensor"}))) == {"no": "tensor"}


def test_pixels_are_pinned_where_there_is_a_gpu(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: pinned.append(self) or self)
    assert echo_loader(Echo(), 1)._loader.pin_memory
    pixels = torch.zeros(2, 1000, 1000, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    batch, _ = pin_memory((pack({"pixels": pixels, "row": torch.ones(3)}), []))
    assert pinned == [pixels] and unpack(batch)["pixels"] is pixels


@dataclasses.dataclass
class BoxTargets(Targets):
    box: torch.Tensor | None = stacked()


def image(height=4, width=6, boxes=2, value=50, **fields) -> LoadedImage:
    return LoadedImage(
        pixels=np.full((height, width, 3), value, dtype=np.uint8),
        image_transform=ImageTransform((2 * height, 2 * width), (height, width)),
        name=f"photo_{height}x{width}",
        boxes=None if boxes is None else np.arange(4 * boxes, dtype=np.float32).reshape(boxes, 4),
        **fields,
    )


def encoding(ids, segments=None, summary=None) -> TextEncoding:
    ids = np.array(ids, dtype=np.int64)
    segments = np.zeros_like(ids) if segments is None else np.array(segments, dtype=np.int64)
    return TextEncoding(ids, segments, np.arange(len(ids)), summary)


def text(length=3, image_index=(0,), **changes) -> EncodedText:
    fields = {
        "encoding": encoding(range(5, 5 + length)),
        "image_index": image_index,
        "targets": BoxTargets(np.full(4, length, dtype=np.float32)),
        "record": {"length": length},
    }
    return EncodedText(**{**fields, **changes})


def join(*examples, **options):
    return collate(examples, **options)


def test_images_are_padded_and_texts_point_at_their_rows():
    batch = join(
        EncodedSample([image(4, 6)], [text(3), text(2)]),
        EncodedSample([image(5, 3), image(2, 2)], [text(4, (0, 1)), text(1, (1,)), text(1, ())]),
    )
    assert batch.images.pixels.shape == (3, 3, 5, 6)
    assert batch.images.sizes.tolist() == [[4, 6], [5, 3], [2, 2]]
    assert batch.images.original_sizes.tolist() == [[8, 12], [10, 6], [4, 4]]
    assert batch.images.names == ["photo_4x6", "photo_5x3", "photo_2x2"]
    np.testing.assert_array_equal(batch.images.pixels[0, :, 0, 0], [50, 50, 50])
    assert not batch.images.pixels[0, :, 4].any()
    assert batch.image_index.tolist() == [[0, -1], [0, -1], [1, 2], [2, -1], [-1, -1]]
    assert batch.texts.attention_mask.sum(1).tolist() == [3, 2, 4, 1, 1]
    assert batch.targets.box[:, 0].tolist() == [3, 2, 4, 1, 1]
    assert batch.targets.box.dtype == torch.float32
    assert [record["length"] for record in batch.records] == [3, 2, 4, 1, 1]
    assert [len(boxes) for boxes in batch.boxes] == [2, 2, 2]
    assert batch.detection_targets is None and len(batch) == 5


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(4, 6), (7, 8)], (8, 10)),
        ([(5, 5)], (8, 10)),  # a square image lies as a wide one
        ([(6, 4)], (10, 8)),
        ([(4, 6), (6, 4)], (10, 10)),
        ([(4, 20)], (8, 20)),  # a canvas grows with its image
        ([(9, 4), (12, 11)], (12, 11)),
    ],
)
def test_images_lie_on_a_canvas(sizes, expected):
    batch = join(*(EncodedSample([image(*size)], [text()]) for size in sizes), canvas=(8, 10))
    assert batch.images.pixels.shape == (len(sizes), 3, *expected)
    assert batch.images.sizes.tolist() == [list(size) for size in sizes]
    for pixels, (height, width) in zip(batch.images.pixels, sizes, strict=True):
        assert pixels[:, :height, :width].all()
        assert not pixels[:, height:].any() and not pixels[:, :, width:].any()


def test_precomputed_features_come_without_pixels():
    one, two = image(4, 6, boxes=2), image(5, 3, boxes=0)
    one.features, two.features = np.ones((2, 7), dtype=np.float32), np.zeros((0, 7), dtype=np.float32)
    images = join(EncodedSample([one], [text()]), EncodedSample([two], [text()])).images
    assert images.pixels.shape == (2, 3, 0, 0) and len(images) == 2
    assert images.sizes.tolist() == [[4, 6], [5, 3]] and images.original_sizes.tolist() == [[8, 12], [10, 6]]
    moved = images.to("cpu").precomputed
    assert [rows.shape for rows in moved.features] == [(2, 7), (0, 7)] and moved.image_features is None
    one.image_feature = np.ones(7, dtype=np.float32)
    with pytest.raises(UserError, match="photo_5x3"):
        join(EncodedSample([one, two], [text()]))


def test_detection_targets_pad_attributes_to_the_most_slots():
    one = DetectionObjects(np.ones((1, 4), np.float32), np.array([3]), np.array([[5, 6]]))
    none = DetectionObjects(np.ones((0, 4), np.float32), np.array([], dtype=np.int64), np.zeros((0, 1), np.int64))
    two = DetectionObjects(np.ones((2, 4), np.float32), np.array([0, 1]), np.array([[7], [-1]]))
    targets = join(*(EncodedSample([image(objects=o)], [text()]) for o in (one, none, two))).detection_targets
    assert [boxes.shape for boxes in targets.boxes] == [(1, 4), (0, 4), (2, 4)]
    assert [classes.tolist() for classes in targets.classes] == [[3], [], [0, 1]]
    assert [attributes.tolist() for attributes in targets.attributes] == [[[5, 6]], [], [[7, -1], [-1, -1]]]
    assert targets.attributes[1].shape == (0, 2)
    plain = DetectionObjects(np.ones((1, 4), np.float32), np.array([3]))
    assert join(EncodedSample([image(objects=plain)], [text()])).detection_targets.attributes is None


def test_labels_of_boxes_stay_with_their_image():
    def example(boxes: int) -> EncodedSample:
        classes, probabilities = np.arange(boxes), np.full((boxes, 3), boxes, dtype=np.float32)
        masks, hide = np.ones((boxes, 7, 7), dtype=np.float32), np.ones((boxes, 4), dtype=np.float32)
        shown = image(boxes=boxes, box_classes=classes, class_probs=probabilities, roi_masks=masks, boxes_to_mask=hide)
        return EncodedSample([shown], [text(seed=boxes + 5)])

    batch = join(example(2), example(0))
    assert [rows.tolist() for rows in batch.region_labels.classes] == [[0, 1], []]
    assert [rows.tolist() for rows in batch.region_labels.class_probs] == [[[2, 2, 2], [2, 2, 2]], []]
    assert [tuple(masks.shape) for masks in batch.roi_masks] == [(2, 7, 7), (0, 7, 7)]
    assert [tuple(boxes.shape) for boxes in batch.masking.boxes_to_mask] == [(2, 4), (0, 4)]
    assert batch.masking.seeds.tolist() == [7, 5]


def test_examples_that_do_not_go_together():
    objects = DetectionObjects(np.ones((1, 4), np.float32), np.array([3]))
    for first, second in ((image(), image(2, 2, boxes=None)), (image(2, 2, objects=objects), image(4, 6))):
        with pytest.raises(UserError) as caught:
            join(EncodedSample([first], [text()]), EncodedSample([second], [text()]))
        assert "photo_4x6" in str(caught.value) and "photo_2x2" in str(caught.value)


def test_texts_are_padded_at_the_end():
    one = text(encoding=encoding([2, 9, 3], [0, 1, 1], summary=1))
    other = text(encoding=encoding([2, 3], summary=0), region_of_token=np.array([1, -1]))
    batch = join(EncodedSample([image()], [one, other])).texts
    assert batch.input_ids.tolist() == [[2, 9, 3], [2, 3, 0]]
    assert batch.token_type_ids.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.attention_mask.tolist() == [[True] * 3, [True, True, False]]
    assert batch.summary.tolist() == [1, 0] and batch.summary.dtype == torch.int64
    assert batch.region_of_token.tolist() == [[-1, -1, -1], [1, -1, -1]]
    empty = pad_texts([text(encoding=encoding([]))])
    assert empty.input_ids.shape == (1, 1) and not empty.attention_mask.any()
    assert empty.summary is None and empty.region_of_token is None


IMAGES = 256  # of a batch, each with boxes, features and labels of other numbers


class ManyImages:
    def __getitem__(self, request) -> EncodedSample:
        number, count = request.group, request.group % 4
        rows = functools.partial(np.full, fill_value=number, dtype=np.float32)
        one = image(boxes=count, class_probs=rows((count, 5)), features=rows((count, 3)), image_feature=rows(3))
        one.objects = DetectionObjects(rows((count + 1, 4)), np.full(count + 1, number))
        return EncodedSample([one], [text(2 + count, seed=number)])


@pytest.fixture
def few_file_descriptors() -> Iterator[None]:
    """This process and its workers may open 64 more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(120)  # without descriptors, workers hang
def test_batches_of_many_images_need_few_file_descriptors(few_file_descriptors):
    sampler = GroupedBatchSampler([[number] for number in range(3 * IMAGES)], IMAGES, shuffle=False)
    first, *others = BatchLoader(ManyImages(), sampler, collate, workers=1)  # each batch keeps its descriptors
    assert len(others) == 2
    assert plain(first) == plain(collate([ManyImages()[Request(number, ())] for number in range(IMAGES)]))


def test_one_image_with_all_its_texts(dataset, tiny):
    data = examples(dataset, tiny.tokenizer, with_objects=True)
    assert len(data) == len(dataset) and data.groups == dataset.groups
    example = data[Request(0, tuple(dataset.groups[0]))]
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


def test_randomness_depends_on_seed_epoch_and_text_only(tiny):
    requests = [Request(0, (text,), epoch) for epoch in range(12) for text in (0, 1)]

    def drawn(seed: int, order: list[Request]) -> dict[Request, tuple[bool, int, int]]:
        data = examples(captions(tiny), tiny.tokenizer, resize=(SAME, DOUBLE), flip_probability=0.5, seed=seed)
        made = {one: data[one] for one in order}
        return {one: (*data_look(example), example.texts[0].seed) for one, example in made.items()}

    first = drawn(1, requests)
    assert first == drawn(1, requests[::-1])
    assert first != drawn(2, requests)
    assert {look[:2] for look in first.values()} == {(flipped, scale) for flipped in (False, True) for scale in (1, 2)}


def test_an_image_that_is_missing_or_broken_is_named(dataset, tiny):
    texts = tuple(dataset.groups[1])
    path = dataset.sample(texts).images[0].locate()
    data = examples(dataset, tiny.tokenizer)
    path.write_bytes(path.read_bytes()[:60])
    with refused(path.name, "data.skip_broken"):
        data[Request(1, texts)]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        data[Request(1, texts)]


def broken(tiny, number: int, **options) -> EncodedDataset:
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
    assert data.broken == {0, 1} and len(caplog.records) == 2 and "seven.png" in caplog.text
    assert len(data[Request(0, (1,))].texts) == 1, "as many texts as were asked for"
    assert data[Request(2, (4,))].texts[0].record["text_index"] == 4


def test_the_replacement_looks_as_the_broken_image_would_have(tiny):
    options = {"resize": (SAME, DOUBLE), "flip_probability": 0.5}
    whole = examples(captions(tiny), tiny.tokenizer, **options)
    looks = [data_look(whole[Request(0, (0,), epoch)]) for epoch in range(8)]
    data = broken(tiny, 1, skip_broken=True, **options)
    assert [data_look(data[Request(0, (0,), epoch)]) for epoch in range(8)] == looks
    assert len(set(looks)) > 2


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_broken_image_may_be_blank_and_keep_its_texts_and_boxes(tiny, caplog, is_missing):
    """As in VL-BERT's official pre-training, if the size is known."""
    options = {"resize": (DOUBLE,), "flip_probability": 1.0}
    whole = examples(captions(tiny), tiny.tokenizer, **options)[Request(0, (0, 1))]
    data = broken(tiny, 1, skip_broken="blank", **options)
    if is_missing:
        (tiny.images_root / "seven.png").unlink()
    example = data[Request(0, (0, 1))]
    assert [text.record["image_id"] for text in example.texts] == ["7", "7"]
    np.testing.assert_array_equal(example.images[0].boxes, whole.images[0].boxes)
    assert example.images[0].image_transform == whole.images[0].image_transform
    assert example.images[0].pixels.shape == whole.images[0].pixels.shape
    assert np.unique(example.images[0].pixels.reshape(-1, 3), axis=0).tolist() == [list(MEAN_COLOUR["BGR"])]
    assert data.broken == {0} and "seven.png" in caplog.text and "A blank image is used instead" in caplog.text


def test_the_next_image_is_used_where_the_size_of_a_broken_one_is_unknown(tiny, caplog):
    dataset = captions(tiny)
    sample = dataset.sample
    dataset.sample = lambda texts: dataclasses.replace(
        sample(texts), images=tuple(dataclasses.replace(image, size=None) for image in sample(texts).images)
    )
    data = examples(dataset, tiny.tokenizer, skip_broken="blank")
    broken(tiny, 1)
    assert data[Request(0, (0,))].texts[0].record["image_id"] != "7"
    assert "The next image is used instead" in caplog.text


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


def test_a_preprocessor_draws_from_the_generator_of_its_text(tiny):
    dataset = captions(tiny)
    data = examples(dataset, tiny.tokenizer, seed=5)
    example = data[Request(1, (3, 2), 4)]
    assert [text.seed for text in example.texts] == [int(random_generator(5, 4, n).integers(99)) for n in (3, 2)]
