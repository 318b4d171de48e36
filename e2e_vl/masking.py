"""Which regions are masked in pre-training, and how text and regions are cut to one length (official VL-BERT code).

Plain numpy and numbers, for readers and tasks alike.
"""

from __future__ import annotations

import numpy as np


def choose_regions(
    count: int, generator: np.random.Generator, probability: float = 0.15, hide: float = 0.9
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the regions whose class is to be predicted, and those of them that the model may not see.

    Every region is chosen on its own; none is ever forced. The whole image is never chosen, so it is not counted here.
    The paper hides every chosen region (`hide=1`); the official code leaves one in ten visible.

    Args:
        count: R, candidate boxes without the whole image.
        generator: source of randomness; one number is drawn for each region.
        probability: chance of a region to be chosen.
        hide: chance of a chosen region to be hidden.

    Returns:
        Two bool arrays [R]: chosen (labelled), and chosen and hidden.
    """
    drawn = generator.random(count)
    return drawn < probability, drawn < probability * hide


def cut_lengths(text_length: int, region_count: int, limit: int) -> tuple[int, int]:
    """How many wordpieces and regions of one text are kept, so that both together are no more than `limit`.

    One is dropped from the longer of the two again and again; of equally long ones the text is cut. At least two
    wordpieces ([CLS] and [SEP]) and one region stay, even where they pass the limit. Regions are dropped from the end,
    wordpieces from before the final [SEP], which stays. Words and regions are masked before they are cut, so a region
    that is cut off may still have hidden pixels.

    Args:
        text_length: wordpieces with [CLS] and [SEP].
        region_count: regions as they stand in the sequence, so with the whole image if the encoder takes it as one. 0
            is a text without image: only the text is cut.
        limit: 64 in all official settings; the [END] element does not count.

    Returns:
        (wordpieces kept, regions kept).
    """
    if text_length + region_count <= limit:
        return text_length, region_count
    if region_count == 0:
        return max(limit, 2), 0
    text = min(text_length, max(limit // 2, limit - region_count))
    return max(text, 2), max(limit - text, 1)
