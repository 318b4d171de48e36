"""Bootstrap intervals over images."""

from __future__ import annotations

import numpy as np

from e2e_vl.scoring.intervals import bootstrap_intervals


def test_images_are_drawn_so_that_equal_texts_of_an_image_add_no_certainty():
    generator = np.random.default_rng(0)
    of_images = generator.random(400) < 0.7
    once = bootstrap_intervals(of_images[:, None].astype(float), np.arange(400))
    images = np.repeat(np.arange(400), 5)
    five_times = bootstrap_intervals(np.repeat(of_images, 5)[:, None].astype(float), images)
    assert np.array_equal(once, five_times)
    mean = of_images.mean()
    expected = mean + np.array([-1.96, 1.96]) * np.sqrt(mean * (1 - mean) / 400)
    assert np.abs(once[0] - expected).max() < 0.006, "the normal approximation"


def test_a_mean_over_some_texts_and_over_none():
    values = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    counted = np.array([[True, False], [False, False], [True, False]])
    intervals = bootstrap_intervals(values, np.array([4, 4, 9]), counted, resamples=50)
    assert intervals[0].tolist() == [1, 1] and np.isnan(intervals[1]).all()
    assert np.isnan(bootstrap_intervals(values, np.array([4, 4, 9]), resamples=0)).all()
