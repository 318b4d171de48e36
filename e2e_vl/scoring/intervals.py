"""Bootstrap intervals over images: the texts about one image depend on each other, so whole images are drawn."""

from __future__ import annotations

import numpy as np

PERCENT = 95
RESAMPLES = 1_000
SEED = 0


def bootstrap_intervals(
    values: np.ndarray, images: np.ndarray, counted: np.ndarray | None = None, resamples: int = RESAMPLES
) -> np.ndarray:
    """Return the 95 % percentile intervals of means.

    Args:
        values: float [texts, means], the value of each text in each mean.
        images: int [texts], the image of each text.
        counted: bool [texts, means], whether a text counts in a mean; None: all do.

    Returns:
        float64 [means, 2], lower and upper end; NaN without resamples, or where none has a text.
    """
    intervals = np.full((values.shape[1], 2), np.nan)
    if resamples == 0:
        return intervals
    if counted is None:
        counted = np.ones_like(values, dtype=bool)
    _, image_rows = np.unique(images, return_inverse=True)
    num_images = int(image_rows.max()) + 1
    sums = np.zeros((num_images, values.shape[1]))
    counts = np.zeros((num_images, values.shape[1]))
    np.add.at(sums, image_rows, np.where(counted, values, 0.0))
    np.add.at(counts, image_rows, counted)
    draws = np.random.default_rng(SEED).multinomial(num_images, np.full(num_images, 1 / num_images), size=resamples)
    totals = draws @ counts
    means = np.divide(draws @ sums, totals, out=np.full_like(totals, np.nan), where=totals > 0)
    ends = ((100 - PERCENT) / 2, (100 + PERCENT) / 2)
    has_mean = ~np.isnan(means).all(axis=0)
    intervals[has_mean] = np.nanpercentile(means[:, has_mean], ends, axis=0).T
    return intervals
