from __future__ import annotations

import collections

import numpy as np
import pytest
from torch.utils.data import DataLoader

from e2e_vl.data.batching import GroupedBatchSampler
from e2e_vl.data.tables import TextGroups

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


def test_an_epoch_smaller_than_a_batch_fills_up_by_repeating():
    [batch] = make([[0], [1, 2]], 7, seed=1)
    assert len(batch) == 7
    assert set(texts_of([batch])) == {0, 1, 2}


def test_accumulation_fills_up_the_last_step_and_leaves_the_order():
    whole = make(GROUPS, 6, 2, seed=4, epoch=3)
    parts = make(GROUPS, 2, 2, seed=4, epoch=3, accumulate=3)
    assert whole.num_groups % 6, "the last batch should need filling"
    assert len(parts) == 3 * len(whole)
    assert [request for batch in parts for request in batch] == [request for batch in whole for request in batch]
    evaluation = make(GROUPS, 2, 2, shuffle=False, accumulate=3)
    assert texts_of(evaluation) == TEXTS


def test_one_text_per_image_is_sampling_of_single_texts():
    requests = [request for batch in make(GROUPS, 3, 1, shuffle=False) for request in batch]
    assert [request.texts for request in requests] == [(text,) for text in TEXTS]


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
    samplers = of_ranks(world_size, 3, shuffle=False)
    for rank, sampler in enumerate(samplers):
        assert list(sampler) == one[rank::world_size]
        assert len(sampler) == len(one[rank::world_size])


def test_epochs_and_seeds_differ_but_are_repeatable():
    def order(seed: int, epoch: int) -> list[int]:
        return texts_of(make(GROUPS, 4, 2, seed=seed, epoch=epoch))

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6
    sampler = make(GROUPS, 4, 2, seed=1)
    sampler.set_epoch(2)
    assert texts_of(sampler) == order(1, 2)
    assert {request.epoch for batch in sampler for request in batch} == {2}


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


def test_resuming_an_evaluation_counts_batches_of_all_ranks():
    one = list(make(GROUPS, 3, 2, shuffle=False))
    for start in range(len(one) + 1):
        samplers = of_ranks(2, 3, shuffle=False, start_batch=start)
        rest = [batch for sampler in samplers for batch in sampler]
        assert sorted(texts_of(rest)) == texts_of(one[start:])
        assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers]


def test_images_without_texts_keep_the_numbers_of_the_others():
    groups = [[], [0], [], [1, 2]]
    requests = [request for batch in make(groups, 2, shuffle=False) for request in batch]
    assert [(request.group, request.texts) for request in requests] == [(1, (0,)), (3, (1, 2))]


def test_all_texts_of_one_image_appear_in_all_arrangements():
    seen = collections.Counter(
        request.texts for epoch in range(40) for batch in make([[0, 1, 2]], 1, epoch=epoch) for request in batch
    )
    assert len(seen) == 6


def test_the_order_stays_what_it_always_was():
    """Runs can be resumed and repeated with later versions."""
    assert texts_of(make([[3, 1, 4, 15], [9], [], [2, 6, 5]], 2, 2, seed=1, epoch=2)) == ORDER_IN_PAIRS
    assert texts_of(make(GROUPS, 3, None, seed=7, epoch=1)) == ORDER_OF_IMAGES


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("texts_per_image", [1, 2, None])
def test_consecutive_groups_give_what_lists_give(shuffle, texts_per_image):
    counts = [len(group) for group in GROUPS]
    counts.insert(2, 0)
    groups = TextGroups.consecutive(counts)
    lists = [list(group) for group in groups]
    assert [text for texts in lists for text in texts] == TEXTS
    options = {"seed": 4, "epoch": 1, "shuffle": shuffle}
    arrays = list(make(groups, 3, texts_per_image, **options))
    assert arrays == list(make(lists, 3, texts_per_image, **options))
    request = arrays[0][0]
    assert type(request.group) is int
    assert {type(text) for text in request.texts} == {int}


def test_millions_of_groups_take_a_few_bytes_each():
    sampler = GroupedBatchSampler(TextGroups.consecutive(np.ones(300_000, dtype=np.int64)), 8, 1)
    arrays = [value for value in vars(sampler).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) <= 40 * 300_000
    assert len(next(iter(sampler))) == 8


def test_works_as_the_batch_sampler_of_a_data_loader():
    class Echo:
        def __getitem__(self, request):
            return request

    sampler = GroupedBatchSampler(GROUPS, 4, 2, seed=3)
    loader = DataLoader(Echo(), batch_sampler=sampler, collate_fn=list)
    assert list(loader) == list(sampler)
    assert len(loader) == len(sampler)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images_per_batch": 3, "world_size": 2}, "cannot be split evenly over 2 processes"),
        ({"images_per_batch": 0}, "cannot be split evenly"),
        ({"images_per_batch": 2, "groups": [[], []]}, "no texts to sample from"),
    ],
)
def test_numbers_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupedBatchSampler(**{"groups": GROUPS, **arguments})


def test_an_epoch_cannot_start_behind_its_end():
    with pytest.raises(ValueError, match="cannot start at batch 4, an epoch has 3 batches"):
        GroupedBatchSampler(GROUPS, 2).set_epoch(0, 4)
