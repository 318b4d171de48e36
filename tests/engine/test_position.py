"""The place of a run in its data, counted in images."""

from __future__ import annotations

import pytest

from e2e_vl.data.batching import GroupedBatchSampler
from e2e_vl.run.train import place_after, steps_to

GROUPS = [[number] for number in range(12)]


def sampler(images: int, accumulate: int = 1, groups=GROUPS, **options) -> GroupedBatchSampler:
    return GroupedBatchSampler(groups, images // accumulate, accumulate=accumulate, **options)


def seen(one: GroupedBatchSampler, first: int, last: int) -> list[int]:
    """Images of steps of several epochs."""
    per_epoch = one.batches_per_epoch // one.accumulate
    images = []
    for step in range(first, last):
        epoch, done = divmod(step, per_epoch)
        one.set_epoch(epoch, start_batch=done * one.accumulate)
        batches = iter(one)
        images += [request.group for _ in range(one.accumulate) for request in next(batches)]
    return images


@pytest.mark.parametrize(("images", "accumulate"), [(4, 1), (4, 2), (2, 1), (1, 1), (8, 4)])
def test_a_batch_of_another_size_goes_on_with_the_next_image(images, accumulate):
    """After 8 images of the second epoch no image is repeated and none left out."""
    before, after = sampler(4), sampler(images, accumulate)
    steps = steps_to(place_after(5, before), after)
    last = 6 if images == 8 else 2 * 12 // images
    rest = seen(after, steps, last) if images != 8 else seen(after, steps, steps + 1)[:4]
    assert sorted(seen(before, 3, 5) + rest) == list(range(12))


def test_steps_of_the_same_size_are_counted_as_before():
    one = sampler(5)  # an epoch is filled up to 15 images
    assert [steps_to(place_after(steps, one), one) for steps in range(9)] == list(range(9))
    assert place_after(4, one)["epoch"] == 1 and place_after(4, one)["images"] == 5


def test_what_cannot_go_on_is_refused():
    place = place_after(5, sampler(4))
    with pytest.raises(ValueError, match=r"images_per_batch=3.* after 8 images of epoch 2.*a divisor of 8.* earlier 4"):
        steps_to(place, sampler(3))
    for other, name in (
        (sampler(4, seed=1), "seed differ"),
        (sampler(4, texts_per_image=1), "data.texts_per_image differ"),
        (sampler(4, groups=[*GROUPS, [12]]), "number of images differ"),
    ):
        with pytest.raises(ValueError, match=rf"inside of epoch 2, after 8 of its images.*\({name}\)"):
            steps_to(place, other)
        assert steps_to(place_after(6, sampler(4)), other) > 0, "between epochs everything goes on"
    assert steps_to(place_after(6, sampler(4)), sampler(3)) == 8
