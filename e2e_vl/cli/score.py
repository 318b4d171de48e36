"""Score anybody's predictions of referring expressions, or of the phrases of captions, against the annotations.

    e2e-vl score predictions.json --data refcoco+ --split val --root DATA
    e2e-vl score results.bbox.json --data refcoco+ --split val --questions finetune_refcoco+_val.json
    e2e-vl score answers.jsonl --data refcoco+ --split testA --questions questions.jsonl --coordinates 0-1000

Reads predictions of this package, COCO results, boxes of MDETR and MMDetection, and answers of vision-language models
(docs/scoring.md). Prints accuracies at IoUs from 0.5 to 0.9, the mean IoU and the ceiling of the candidates; for
gRefCOCO Pr@(F1=1), N-acc and T-acc; for Flickr30K Entities R@1, R@5 and R@10; each with a 95 % bootstrap interval.
Records that are missing, repeated or unknown are errors or counted, never left out in silence.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detector.errors import UserError
from detector.io import read_yaml, write_json
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.config import DataConfig
from e2e_vl.config_files import CONFIGS, load_config
from e2e_vl.data.official_sizes import find_official_split, name_number
from e2e_vl.data.overlap import GlobalImageId, ImageIdLookup, read_visual_genome
from e2e_vl.samples import EntityPhrases, ReferredBoxes
from e2e_vl.scoring.answers import Answer, AnswerFile, read_answers
from e2e_vl.scoring.coordinates import LAYOUTS, PIXELS, SCALES, choose_scale, require_upright, to_corners, to_pixels
from e2e_vl.scoring.intervals import PERCENT, RESAMPLES, SEED
from e2e_vl.scoring.matching import match, read_questions
from e2e_vl.scoring.measures import (
    CONVENTIONS,
    GREC_MIN_SCORE,
    Measure,
    PredictedBoxes,
    measure_generalized,
    measure_phrases,
    measure_referring,
    predicted_boxes,
)
from e2e_vl.scoring.phrase_answers import boxes_as_array, match_phrases, read_phrase_answers
from e2e_vl.scoring.truths import TrueText, Truths, read_truths

EXPLAINED = {
    "continuous": "corners x2 = x + width, no pixel added",
    "mattnet": "corners x2 = x + width, no pixel added; overlaps of at most one pixel count as none",
    "vlbert": "one pixel added to every extent",
    "strict": "as mattnet, but more than the threshold",
    "generalized": "generalised IoU, as MDETR",
}
# options without an effect on phrases, and their defaults
ONLY_REFERRING = {"iou": "continuous", "questions": None, "answer": None, "min_score": None}


@dataclasses.dataclass
class Report:
    """What the command prints and writes."""

    lines: list[str] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    measures: list[Measure] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        measures = {}
        for measure in self.measures:
            interval = None if math.isnan(measure.interval[0]) else list(measure.interval)
            measures[measure.name] = {"value": measure.value, "interval": interval, "count": measure.count}
        return {**self.facts, "counts": self.counts, "measures": measures}


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = make_parser(__doc__, prog)
    file = {"type": Path, "metavar": "FILE"}
    data_help = "a data set that `e2e-vl download` lists, such as refcoco+, or the YAML file of a run"
    parser.add_argument("predictions", **file, help="JSON, or JSON lines (.jsonl)")
    parser.add_argument("--data", required=True, metavar="NAME", help=data_help)
    parser.add_argument("--split", required=True, help="split of the data set, such as val or testA")
    parser.add_argument("--root", metavar="DATA", help="folder of the data set (default: DATA, or the YAML file's)")
    parser.add_argument("--protocol", metavar="NAME", help="partition, the name in `refs(NAME).p`: unc, google or umd")
    parser.add_argument("--questions", **file, help="what the model was asked, where the records only have its ids")
    parser.add_argument("--answer", metavar="KEY", help="key of the prediction in a record, where several could be it")
    parser.add_argument("--boxes", choices=LAYOUTS, help="layout of the boxes (default: the format's)")
    scales = (PIXELS, *SCALES)
    parser.add_argument("--coordinates", choices=scales, help="scale of the boxes (default: the format's, or found)")
    parser.add_argument("--iou", choices=CONVENTIONS, default="continuous", help="IoU convention (default: continuous)")
    parser.add_argument("--min-score", type=float, metavar="S", help="gRefCOCO: least score of a predicted box")
    missing_help = "texts without a record: count them as wrong, or score the others only (default: an error)"
    parser.add_argument("--missing", choices=("wrong", "skip"), help=missing_help)
    unknown_help = "leave out records about texts that are not in the split, and count them (default: an error)"
    parser.add_argument("--skip-unknown", action="store_true", help=unknown_help)
    parser.add_argument("--pretraining-images", **file, help="images of a pre-training: count those of the split")
    ids_help = "source of these ids, if names do not show it"
    parser.add_argument("--pretraining-ids", choices=("coco", "vg"), help=ids_help)
    parser.add_argument("--visual-genome", **file, help="Visual Genome's image_data.json, with COCO's ids")
    resamples_help = f"resamples of the bootstrap (default: {RESAMPLES})"
    parser.add_argument("--resamples", type=int, default=RESAMPLES, metavar="N", help=resamples_help)
    parser.add_argument("--json", **file, help="file for all numbers")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of `data` that override the file")
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    args = parse_with_settings(build_parser(prog), argv)
    data = data_settings(args.data, args.root, args.protocol, args.overrides)
    genome = None if args.visual_genome is None else read_visual_genome(args.visual_genome)
    id_lookup = ImageIdLookup(genome)
    truths = read_truths(data, args.split, id_lookup)
    report = Report(facts={"data": args.data, "split": args.split, "predictions": str(args.predictions)})
    kind = type(truths.texts[0].truth)
    if kind is EntityPhrases:
        texts, predictions = score_phrases(args, truths, report)
    elif kind is ReferredBoxes:
        texts, predictions = score_referring(args, truths, report)
    else:
        raise UserError(f"{args.data}: its texts refer to no boxes; score predictions of referring expressions.")
    if args.pretraining_images is not None:
        add_leakage(args, truths, texts, predictions, id_lookup, report)
    print("\n".join(report.lines))
    if args.json is not None:
        write_json(args.json, report.as_json())
    return 0


def data_settings(name: str, root: str | None, protocol: str | None, overrides: Iterable[str]) -> DataConfig:
    """Return the settings of a data set by the name of its download, or by the config of a run."""
    sets = read_yaml(CONFIGS / "downloads.yaml")["sets"]
    config = name
    words = [*overrides, "output=unused"]
    if name in sets:
        if not sets[name].get("configs"):
            raise UserError(f"{name}: no config reads this download; give the YAML file of a run as --data.")
        config = CONFIGS / f"{sets[name]['configs'][0]}.yaml"
        root = root or "DATA"
    if root is not None:
        words.insert(0, f"data.root={root}")
    data = load_config(config, words).data
    if protocol is not None:
        refs = data.files.get("refs", "")
        changed = re.sub(r"\([^()]*\)", f"({protocol})", refs)
        if "(" not in refs:
            raise UserError(f"--protocol: the file of {name} is {refs or 'no refs file'}, without a partition in it.")
        data = load_config(config, [*words, f"data.files.refs={changed}"]).data
    return data


def score_referring(
    args: argparse.Namespace, truths: Truths, report: Report
) -> tuple[list[TrueText], list[PredictedBoxes]]:
    """Score referring expressions; return the texts that count, and what was predicted for them."""
    add_split(args, truths, report)
    file = read_answers(args.predictions, args.answer)
    questions = None if args.questions is None else read_questions(args.questions)
    matches = match(file, truths.texts, questions)
    report.facts["told_by"] = matches.told_by
    report.lines.append(f"the expression of a record is told by {matches.told_by}")
    records = len(file.answers)
    counted = check_records(args, records, matches.missing, matches.repeated, matches.unknown, truths, report)
    layout = args.boxes or file.layout
    scale = scale_of(args, file, layout, truths.texts, matches.answers)
    report.facts |= {"format": file.kind, "boxes": layout, "coordinates": scale}
    source = "stated" if args.coordinates else "the format's" if file.is_pixels else "found from all boxes of the file"
    report.lines.append(f"{args.predictions}: {file.kind}; boxes {layout}, coordinates {scale} ({source})")
    is_generalized = any(len(text.truth.boxes) != 1 for text in truths.texts)
    has_scores = any(answer is not None and answer.scores is not None for answer in matches.answers)
    min_score = args.min_score
    if is_generalized and min_score is None and has_scores:
        min_score = GREC_MIN_SCORE
    if min_score is not None and not is_generalized:
        raise UserError("--min-score is for expressions about no or several objects; the others have one best box.")
    texts = []
    predictions = []
    for text, answer in zip(truths.texts, matches.answers, strict=True):
        if answer is not None or counted == "all":
            texts.append(text)
            predictions.append(predicted_boxes(answer, text, layout, scale, min_score))
    add_box_counts(texts, predictions, report)
    report.facts["iou"] = args.iou
    if is_generalized:
        limit = "all boxes of a record" if min_score is None else f"the boxes with a score of at least {min_score}"
        report.lines.append(f"predicted: {limit}; Pr@(F1=1) by generalised IoU is gRefCOCO's official measure")
        report.facts["min_score"] = min_score
        report.measures = measure_generalized(texts, predictions, args.iou, args.resamples)
    else:
        report.lines.append(f"IoU: {args.iou} ({EXPLAINED[args.iou]})")
        report.measures = measure_referring(texts, predictions, args.iou, args.resamples)
        num_candidates = np.mean([len(prediction.candidates) for prediction in predictions])
        report.facts["candidates_per_expression"] = float(num_candidates)
        if max(len(prediction.candidates) for prediction in predictions) <= 1:
            report.measures = [measure for measure in report.measures if measure.name != "ceiling"]
        else:
            report.lines.append(f"ceiling: any of {num_candidates:.1f} boxes per expression is right")
    add_measures(args, report)
    return texts, predictions


def score_phrases(
    args: argparse.Namespace, truths: Truths, report: Report
) -> tuple[list[TrueText], list[list[np.ndarray]]]:
    """Score phrases; return the captions that count, and the boxes of their phrases."""
    for option, default in ONLY_REFERRING.items():
        if getattr(args, option) != default:
            name = option.replace("_", "-")
            raise UserError(f"--{name} is for referring expressions; {args.data} has phrases, leave it out.")
    num_phrases = sum(len(text.truth.boxes) for text in truths.texts)
    num_images = len(truths.image_ids)
    report.lines.append(
        f"{args.data} {args.split}: {num_phrases:,} phrases with a box in {len(truths):,} captions of {num_images:,} "
        f"images; {truths.left_out:,} captions have none"
    )
    report.counts = {"phrases": num_phrases, "captions": len(truths), "images": num_images}
    kind, answers = read_phrase_answers(args.predictions)
    matches = match_phrases(answers, truths.texts)
    counted = check_records(args, len(answers), matches.missing, matches.repeated, matches.unknown, truths, report)
    layout = args.boxes or "xyxy"
    texts = []
    corners = []
    for text, answer in zip(truths.texts, matches.answers, strict=True):
        if answer is None and counted == "all":
            texts.append(text)
            corners.append([np.zeros((0, 4))] * len(text.truth.boxes))
        elif answer is not None:
            texts.append(text)
            corners.append([to_corners(boxes_as_array(boxes), layout) for boxes in answer.boxes])
    all_corners = np.concatenate([boxes for phrases in corners for boxes in phrases])
    box_counts = [sum(map(len, phrases)) for phrases in corners]
    all_sizes = np.repeat(np.array([text.size for text in texts]), box_counts, axis=0)
    scale = args.coordinates or choose_scale(all_corners, all_sizes, True, str(args.predictions))
    report.facts |= {"format": kind, "boxes": layout, "coordinates": scale, "iou": "continuous"}
    report.lines.append(f"{args.predictions}: {kind}; boxes {layout}, coordinates {scale}")
    report.lines.append("IoU: continuous, at least 0.5 with any box of the phrase, or with the box around all of them")
    predictions = []
    for text, phrases in zip(texts, corners, strict=True):
        sizes = [np.tile(text.size, (len(boxes), 1)) for boxes in phrases]
        predictions.append([to_pixels(boxes, size, scale) for boxes, size in zip(phrases, sizes, strict=True)])
    report.measures = measure_phrases(texts, predictions, args.resamples)
    if max(len(boxes) for phrases in predictions for boxes in phrases) <= 1:
        report.lines.append("the file has one box per phrase, so R@5, R@10 and the upper bound are unknown")
    add_measures(args, report)
    return texts, predictions


def add_split(args: argparse.Namespace, truths: Truths, report: Report) -> None:
    """Say how large the split is, and which published one it is."""
    num_objects = len({str(text.ids.get("ref_id")) for text in truths.texts})
    num_images = len(truths.image_ids)
    official = find_official_split(num_images, num_objects, len(truths))
    published = "no split that was published with these numbers"
    if official is not None:
        published = f"as published, {official.name}"
    report.lines.append(
        f"{args.data} {args.split}: {len(truths):,} expressions of {num_objects:,} refs in {num_images:,} images; "
        f"{published}"
    )
    report.counts = {"expressions": len(truths), "refs": num_objects, "images": num_images}
    report.facts["official_split"] = None if official is None else official.name


def check_records(
    args: argparse.Namespace,
    records: int,
    missing: int,
    repeated: int,
    unknown: Sequence[Any],
    truths: Truths,
    report: Report,
) -> str:
    """Count records that are missing, repeated or unknown, or raise; return whether "all" texts count or "answered"."""
    hint = name_number(records)
    if hint:
        hint = f" ({records:,} are {hint})"
    if unknown and not args.skip_unknown:
        raise UserError(
            f"{unknown[0].where} and {len(unknown) - 1:,} more of {records:,} records{hint} are about no text of the "
            f"split {args.split}; choose another --split or --protocol, or leave them out with --skip-unknown."
        )
    if missing and args.missing is None:
        raise UserError(
            f"{args.predictions}: {missing:,} of {len(truths):,} texts of the split {args.split} have no record in its "
            f"{records:,}{hint}; count them as wrong with --missing wrong, or leave them out with --missing skip."
        )
    report.counts |= {"records": records, "missing": missing, "repeated": repeated, "unknown": len(unknown)}
    treated = " (left out)" if args.missing == "skip" else " (wrong)" if missing else ""
    report.lines.append(
        f"{records:,} records: {missing:,} texts without one{treated}, {repeated:,} repeated, {len(unknown):,} unknown"
    )
    if missing == len(truths):
        raise UserError(f"{args.predictions}: no record is about a text of the split {args.split}.")
    return "answered" if args.missing == "skip" else "all"


def scale_of(
    args: argparse.Namespace, file: AnswerFile, layout: str, texts: Sequence[TrueText], answers: Sequence[Answer | None]
) -> str:
    """Return the scale of the boxes of a file, as it is stated or as all of them show."""
    boxes = []
    sizes = []
    for text, answer in zip(texts, answers, strict=True):
        if answer is not None and answer.best_box is not None:
            boxes.append(answer.best_box)
            sizes.append(text.size)
    corners = to_corners(boxes, layout)
    if args.boxes is None:
        require_upright(corners, layout, str(args.predictions))
    if args.coordinates is not None:
        return args.coordinates
    return choose_scale(corners, np.array(sizes).reshape(-1, 2), file.is_pixels, str(args.predictions))


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


def add_measures(args: argparse.Namespace, report: Report) -> None:
    """Print a line per measure, in per cent."""
    if args.resamples > 0:
        report.lines.append(f"[{PERCENT} % intervals: {args.resamples:,} resamples of whole images, seed {SEED}]")
    report.facts |= {"resamples": args.resamples, "resampled": "images"}
    width = max(len(measure.name) for measure in report.measures)
    for measure in report.measures:
        interval = ""
        if args.resamples > 0:
            low, high = measure.interval
            interval = f"  [{100 * low:.2f}, {100 * high:.2f}]"
        report.lines.append(f"  {measure.name:{width}s}  {100 * measure.value:6.2f}{interval}  of {measure.count:,}")


def add_leakage(
    args: argparse.Namespace,
    truths: Truths,
    texts: Sequence[TrueText],
    predictions: Sequence[Any],
    id_lookup: ImageIdLookup,
    report: Report,
) -> None:
    """Say how many images of the split a pre-training has seen, and score the texts about the others."""
    seen_ids: set[GlobalImageId] = set()
    for ids in id_lookup.of_list(args.pretraining_images, args.pretraining_ids, "--pretraining-ids"):
        seen_ids.update(ids)
    seen_images = [number for number, ids in enumerate(truths.image_ids) if not seen_ids.isdisjoint(ids)]
    num_images = len(truths.image_ids)
    line = f"leakage: {len(seen_images):,} of {num_images:,} images of the split are in {args.pretraining_images}"
    report.facts["leakage"] = {"images": num_images, "seen": len(seen_images), "unseen_measures": None}
    is_unseen = ~np.isin([text.image for text in texts], seen_images)
    if seen_images and is_unseen.any():
        rows = np.flatnonzero(is_unseen).tolist()
        unseen_texts = [texts[row] for row in rows]
        unseen_predictions = [predictions[row] for row in rows]
        if isinstance(unseen_texts[0].truth, EntityPhrases):
            measures = measure_phrases(unseen_texts, unseen_predictions, 0)
        elif any(len(text.truth.boxes) != 1 for text in texts):
            measures = measure_generalized(unseen_texts, unseen_predictions, args.iou, 0)
        else:
            measures = measure_referring(unseen_texts, unseen_predictions, args.iou, 0)
        first = measures[0]
        line += f"; without them, {first.name} is {100 * first.value:.2f} of {first.count:,}"
        report.facts["leakage"]["unseen_measures"] = {measure.name: measure.value for measure in measures}
    report.lines.append(line)
