"""Batches of one epoch, with and without workers; errors about the data stay what they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from e2e_vl.data.batching import BatchLoader, GroupedBatchSampler

GROUPS = [[0, 1], [2], [3, 4, 5]]


@dataclasses.dataclass
class Echo:
    """Answers a request with its texts."""

    broken: int | None = None  # a text that cannot be read
    error: type[Exception] = FileNotFoundError

    def __getitem__(self, request):
        if self.broken in request.texts:
            raise self.error(f"photo_{self.broken}.jpg is missing")
        return request.texts


def join(examples):
    if (5,) in examples and len(examples) == 1:
        raise ValueError("these do not go together")
    return examples


def loader(dataset, workers: int, **options) -> BatchLoader:
    sampler = GroupedBatchSampler(GROUPS, 2, 1, shuffle=False)
    return BatchLoader(dataset, sampler, list, workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_the_order_of_the_sampler(workers):
    batches = loader(Echo(), workers)
    assert len(batches) == 3
    for _ in range(2):
        assert list(batches) == [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [FileNotFoundError, ValueError])
def test_an_error_about_the_data_is_raised_as_it_was(workers, error):
    seen = []
    with pytest.raises(error) as caught:
        seen += loader(Echo(3, error), workers)
    assert str(caught.value) == "photo_3.jpg is missing", "and no traceback of a worker"
    iterator = iter(loader(Echo(3, error), workers))
    assert next(iterator) == [(0,), (1,)], "the batches before it are whole"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_joining_is_raised_as_it_was(workers):
    batches = BatchLoader(Echo(), GroupedBatchSampler(GROUPS, 5, 1, shuffle=False), join, workers=workers)
    with pytest.raises(ValueError) as caught:
        list(batches)
    assert str(caught.value) == "these do not go together"


def test_workers_may_stay_for_the_next_epoch():
    batches = loader(Echo(), 1, keep_workers=True)
    first = list(batches)
    batches._loader.batch_sampler.set_epoch(1)
    assert list(batches) == first


def test_no_seed_is_drawn_from_the_generator_of_the_model():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    list(loader(Echo(), 0))
    list(loader(Echo(), 1))
    assert torch.equal(torch.random.get_rng_state(), before)
