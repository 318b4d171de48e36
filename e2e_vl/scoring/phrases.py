"""Scoring a file of predictions of the phrases of captions."""

from __future__ import annotations

import itertools

import numpy as np

from detector.errors import UserError
from e2e_vl.scoring.coordinates import choose_scale, to_corners, to_pixels
from e2e_vl.scoring.measures import measure_phrases
from e2e_vl.scoring.phrase_answers import boxes_as_array, match_phrases, read_phrase_answers
from e2e_vl.scoring.report import Report, ScoreOptions, add_measures, check_records
from e2e_vl.scoring.truths import TrueText, Truths

# options without an effect on phrases, and their defaults
ONLY_REFERRING = {"iou": "continuous", "questions": None, "min_score": None}


def score_phrases(
    options: ScoreOptions, truths: Truths, report: Report
) -> tuple[list[TrueText], list[list[np.ndarray]]]:
    """Score phrases; return the captions that count, and the boxes of their phrases in pixels, best first."""
    for option, default in ONLY_REFERRING.items():
        if getattr(options, option) != default:
            name = option.replace("_", "-")
            raise UserError(f"--{name} is for referring expressions; {options.data} has phrases, leave it out.")
    num_phrases = sum(len(text.truth.boxes) for text in truths.texts)
    num_images = len(truths.image_ids)
    report.lines.append(
        f"{options.data} {options.split}: {num_phrases:,} phrases with a box in {len(truths):,} captions of "
        f"{num_images:,} images; {truths.left_out:,} captions have none"
    )
    report.counts = {"phrases": num_phrases, "captions": len(truths), "images": num_images}
    file = read_phrase_answers(options.predictions, options.answer_key)
    matches = match_phrases(file.answers, truths.texts)
    check_records(options, len(file.answers), matches, truths, report)
    layout = options.layout or "xyxy"
    texts = []
    corners = []  # of each caption and phrase, as they are written
    for text, answer in zip(truths.texts, matches.answers, strict=True):
        if answer is not None:
            texts.append(text)
            corners.append([to_corners(boxes_as_array(boxes), layout) for boxes in answer.boxes])
        elif options.counts_missing:
            texts.append(text)
            corners.append([np.zeros((0, 4))] * len(text.truth.boxes))
    scale = options.scale or find_scale(options, texts, corners, is_pixels=file.is_pixels)
    report.facts |= {"format": file.kind, "boxes": layout, "coordinates": scale, "iou": "continuous"}
    report.lines.append(f"{options.predictions}: {file.kind}; boxes {layout}, coordinates {scale}")
    report.lines.append("IoU: continuous, at least 0.5 with any box of the phrase, or with the box around all of them")
    predictions = []
    without_box = 0
    for text, phrases in zip(texts, corners, strict=True):
        sizes = [np.tile(text.size, (len(boxes), 1)) for boxes in phrases]
        predictions.append([to_pixels(boxes, size, scale) for boxes, size in zip(phrases, sizes, strict=True)])
        without_box += sum(len(boxes) == 0 for boxes in phrases)
    report.counts |= {"without_box": without_box, "other_phrases": matches.other_phrases}
    report.lines.append(
        f"{without_box:,} phrases without a predicted box; {matches.other_phrases:,} records about phrases without a "
        "true box, which do not count"
    )
    report.measures = measure_phrases(texts, predictions, options.resamples)
    if max(map(len, itertools.chain.from_iterable(predictions))) <= 1:
        report.lines.append("the file has one box per phrase, so R@5, R@10 and the upper bound are unknown")
    add_measures(options, report)
    return texts, predictions


def find_scale(
    options: ScoreOptions, texts: list[TrueText], corners: list[list[np.ndarray]], *, is_pixels: bool
) -> str:
    """Return the scale of all boxes of a file; `is_pixels`: its format says so."""
    all_corners = np.concatenate(list(itertools.chain.from_iterable(corners)))
    box_counts = [sum(map(len, phrases)) for phrases in corners]
    all_sizes = np.repeat(np.array([text.size for text in texts]), box_counts, axis=0)
    return choose_scale(all_corners, all_sizes, is_pixels, str(options.predictions))
