"""Images of a split that a pre-training has seen, and the scores without them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from e2e_vl.data.overlap import GlobalImageId
from e2e_vl.samples import EntityPhrases
from e2e_vl.scoring.measures import Measure, measure_generalized, measure_phrases, measure_referring
from e2e_vl.scoring.report import Report
from e2e_vl.scoring.truths import TrueText, Truths


def add_leakage(
    path: Path,
    seen_ids: Set[GlobalImageId],
    truths: Truths,
    texts: Sequence[TrueText],
    predictions: Sequence[Any],
    convention: str,
    report: Report,
) -> None:
    """Say how many images of the split a pre-training has seen, and score the texts about the others.

    Args:
        path: the list of the images of the pre-training, and `seen_ids` their ids.
        texts: those that count, with their `predictions`.
        convention: see `measure_referring`.
    """
    seen_images = [number for number, ids in enumerate(truths.image_ids) if not seen_ids.isdisjoint(ids)]
    num_images = len(truths.image_ids)
    line = f"leakage: {len(seen_images):,} of {num_images:,} images of the split are in {path}"
    report.facts["leakage"] = {"images": num_images, "seen": len(seen_images), "unseen_measures": None}
    is_unseen = ~np.isin([text.image for text in texts], seen_images)
    if seen_images and is_unseen.any():
        rows = np.flatnonzero(is_unseen).tolist()
        is_generalized = any(len(text.truth.boxes) != 1 for text in texts)
        unseen_predictions = [predictions[row] for row in rows]
        measures = _measure([texts[row] for row in rows], unseen_predictions, convention, is_generalized=is_generalized)
        first = measures[0]
        line += f"; without them, {first.name} is {100 * first.value:.2f} of {first.count:,}"
        report.facts["leakage"]["unseen_measures"] = {measure.name: measure.value for measure in measures}
    report.lines.append(line)


def _measure(
    texts: Sequence[TrueText], predictions: Sequence[Any], convention: str, *, is_generalized: bool
) -> list[Measure]:
    """Score some texts without intervals."""
    if isinstance(texts[0].truth, EntityPhrases):
        return measure_phrases(texts, predictions, 0)
    if is_generalized:
        return measure_generalized(texts, predictions, convention, 0)
    return measure_referring(texts, predictions, convention, 0)
