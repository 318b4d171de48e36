"""Scoring a file of predictions of referring expressions, about one object each or about any number of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from detector.errors import UserError
from e2e_vl.data.official_sizes import find_official_split
from e2e_vl.scoring.answers import Answer, AnswerFile, read_answers
from e2e_vl.scoring.coordinates import choose_scale, require_upright, to_corners
from e2e_vl.scoring.matching import match, read_questions
from e2e_vl.scoring.measures import (
    GREC_MIN_SCORE,
    PredictedBoxes,
    measure_generalized,
    measure_referring,
    predicted_boxes,
)
from e2e_vl.scoring.report import Report, ScoreOptions, add_measures, check_records
from e2e_vl.scoring.truths import TrueText, Truths

CONVENTIONS_IN_WORDS = {
    "continuous": "corners x2 = x + width, no pixel added",
    "mattnet": "corners x2 = x + width, no pixel added; overlaps of at most one pixel count as none",
    "vlbert": "one pixel added to every extent",
    "strict": "as mattnet, but more than the threshold",
    "generalized": "generalised IoU, as MDETR",
}


def score_referring(
    options: ScoreOptions, truths: Truths, report: Report
) -> tuple[list[TrueText], list[PredictedBoxes]]:
    """Score referring expressions; return the texts that count, and what was predicted for them."""
    add_split(options, truths, report)
    file = read_answers(options.predictions, options.answer_key)
    questions = None if options.questions is None else read_questions(options.questions)
    matches = match(file, truths.texts, questions)
    report.facts["told_by"] = matches.told_by
    report.lines.append(f"the expression of a record is told by {matches.told_by}")
    check_records(options, len(file.answers), matches, truths, report)
    layout = options.layout or file.layout
    scale = find_scale(options, file, layout, truths.texts, matches.answers)
    add_format(options, file, layout, scale, report)
    is_generalized = any(len(text.truth.boxes) != 1 for text in truths.texts)
    min_score = options.min_score
    if min_score is not None and not is_generalized:
        raise UserError("--min-score is for expressions about no or several objects; the others have one best box.")
    if is_generalized and min_score is None:
        has_scores = any(answer is not None and answer.scores is not None for answer in matches.answers)
        min_score = GREC_MIN_SCORE if has_scores else None
    texts = []
    predictions = []
    for text, answer in zip(truths.texts, matches.answers, strict=True):
        if answer is not None or options.counts_missing:
            texts.append(text)
            predictions.append(predicted_boxes(answer, text, layout, scale, min_score))
    add_box_counts(texts, predictions, report)
    report.facts["iou"] = options.iou
    if is_generalized:
        limit = "all boxes of a record" if min_score is None else f"the boxes with a score of at least {min_score}"
        report.lines.append(f"predicted: {limit}; Pr@(F1=1) by generalised IoU is gRefCOCO's official measure")
        report.facts["min_score"] = min_score
        report.measures = measure_generalized(texts, predictions, options.iou, options.resamples)
    else:
        report.lines.append(f"IoU: {options.iou} ({CONVENTIONS_IN_WORDS[options.iou]})")
        report.measures = measure_referring(texts, predictions, options.iou, options.resamples)
        add_ceiling(predictions, report)
    add_measures(options, report)
    return texts, predictions


def add_split(options: ScoreOptions, truths: Truths, report: Report) -> None:
    """Say how large the split is, and which published one it is."""
    num_objects = len({str(text.ids.get("ref_id")) for text in truths.texts})
    num_images = len(truths.image_ids)
    official = find_official_split(num_images, num_objects, len(truths))
    published = "no split that was published with these numbers"
    if official is not None:
        published = f"as published, {official.name}"
    report.lines.append(
        f"{options.data} {options.split}: {len(truths):,} expressions of {num_objects:,} refs in {num_images:,} "
        f"images; {published}"
    )
    report.counts = {"expressions": len(truths), "refs": num_objects, "images": num_images}
    report.facts["official_split"] = None if official is None else official.name


def find_scale(
    options: ScoreOptions,
    file: AnswerFile,
    layout: str,
    texts: Sequence[TrueText],
    answers: Sequence[Answer | None],
) -> str:
    """Return the scale of the boxes of a file, as it is stated or as all of them show."""
    boxes = []
    sizes = []
    for text, answer in zip(texts, answers, strict=True):
        if answer is not None and answer.best_box is not None:
            boxes.append(answer.best_box)
            sizes.append(text.size)
    corners = to_corners(boxes, layout)
    if options.layout is None:
        require_upright(corners, layout, str(options.predictions))
    if options.scale is not None:
        return options.scale
    return choose_scale(corners, np.array(sizes).reshape(-1, 2), file.is_pixels, str(options.predictions))


def add_format(options: ScoreOptions, file: AnswerFile, layout: str, scale: str, report: Report) -> None:
    """Say how the boxes are read, and who says so."""
    source = "found from all boxes of the file"
    if options.scale is not None:
        source = "stated"
    elif file.is_pixels:
        source = "the format's"
    report.facts |= {"format": file.kind, "boxes": layout, "coordinates": scale}
    report.lines.append(f"{options.predictions}: {file.kind}; boxes {layout}, coordinates {scale} ({source})")


def add_box_counts(texts: Sequence[TrueText], predictions: Sequence[PredictedBoxes], report: Report) -> None:
    """Count the texts without a box, and answers that are odd."""
    without_box = 0
    inverted = 0
    outside = 0
    for text, prediction in zip(texts, predictions, strict=True):
        if len(prediction.boxes) == 0:
            without_box += 1
            continue
        x1, y1, x2, y2 = prediction.boxes[0]
        height, width = text.size
        inverted += x2 < x1 or y2 < y1
        outside += min(x1, y1) < -1 or x2 > width + 1 or y2 > height + 1
    report.counts |= {"without_box": without_box, "inverted": int(inverted), "outside": int(outside)}
    report.lines.append(
        f"{without_box:,} texts without a predicted box; {inverted:,} boxes end before they begin, {outside:,} reach "
        "outside their image by more than a pixel"
    )


def add_ceiling(predictions: Sequence[PredictedBoxes], report: Report) -> None:
    """Say of how many candidates the ceiling is; a file with one box per expression has none."""
    nums_candidates = [len(prediction.candidates) for prediction in predictions]
    mean = float(np.mean(nums_candidates))
    report.facts["candidates_per_expression"] = mean
    if max(nums_candidates) <= 1:
        report.measures = [measure for measure in report.measures if measure.name != "ceiling"]
    else:
        report.lines.append(f"ceiling: any of {mean:.1f} boxes per expression is right")
