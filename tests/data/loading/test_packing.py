"""Batches of many images come out of a worker as they went in, and through few file descriptors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler, collate, pack, unpack
from e2e_vl.examples import DetectionObjects, Example, ImageExample, ImageTransform, TextExample
from e2e_vl.text import TextEncoding

IMAGES = 256  # of a batch, each with boxes, features and labels of other numbers


def example(number: int, *, saved: bool = True) -> Example:
    count = number % 4
    rows = functools.partial(np.full, fill_value=number, dtype=np.float32)
    pixels = np.full((4, 6, 3), number % 250, dtype=np.uint8)
    image = ImageExample(pixels, ImageTransform((8, 12), (4, 6)), f"photo_{number}", boxes=rows((count, 4)))
    image.class_probs, image.detected_classes = rows((count, 5)), np.full(count, number)
    image.objects = DetectionObjects(rows((count + 1, 4)), np.full(count + 1, number))
    if saved:
        image.features, image.image_feature = rows((count, 3)), rows(3)
    ids = np.full(2 + count, number)
    return Example([image], [TextExample(TextEncoding(ids, ids, ids), (0,), {"number": number}, seed=number)])


@dataclasses.dataclass
class Examples:
    saved: bool = True

    def __getitem__(self, request) -> Example:
        return example(request.group, saved=self.saved)


def join(examples: list[Example]):
    return collate(examples, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def plain(value: Any) -> Any:
    """A value in which tensors are lists with their dtype and shape, so that two can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def loader(batches: int, *, saved: bool, workers: int) -> BatchLoader:
    sampler = GroupedBatchSampler([[number] for number in range(batches * IMAGES)], IMAGES, shuffle=False)
    return BatchLoader(Examples(saved), sampler, join, workers=workers)


@contextlib.contextmanager
def few_file_descriptors(number: int, seconds: int) -> Iterator[None]:
    """This process and its workers may open `number` more files; TimeoutError once they hang."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def stop(*_: Any) -> None:
        raise TimeoutError("no batch came")

    highest = max(int(file.name) for file in Path("/dev/fd").iterdir())
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + number, hard))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("saved", [True, False], ids=["features", "pixels"])
def test_batches_of_many_images_need_few_file_descriptors(saved):
    expected = plain(join([example(number, saved=saved) for number in range(IMAGES)]))
    with few_file_descriptors(64, seconds=120):
        batches = list(loader(3, saved=saved, workers=1))  # all kept: each holds its descriptors
    assert len(batches) == 3
    assert plain(batches[0]) == expected


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
    assert plain(found) == plain(value)
    assert found["same"][0] is found["same"][1]
    assert plain(unpack(pack({"no": "tensor"}))) == {"no": "tensor"}
