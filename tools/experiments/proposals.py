"""Measure how often the target of an expression is the first of a file's boxes, or among its first few.

    python tools/experiments/proposals.py --config configs/demo/proposals.yaml --split test

The boxes are those of data.files.detections that data.boxes.selection keeps. For each expression they are ranked by the
share of their phrase's (or class name's) words that the expression has, then by score: what a detector can do that
finds and cannot choose. The last row is the ceiling of every model that chooses among these boxes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from detector.boxes import pairwise_iou
from detector.errors import UserError
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.image_loader import open_boxes_of
from e2e_vl.phrases import match_phrase
from e2e_vl.run.build import make_synthetic_data, open_split
from e2e_vl.samples import CandidateBoxes

FIT = 0.5  # IoU from which a box fits a target
FIRST = (1, 2, 5, 10)


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("--config", required=True, help="config of a run on boxes of a file")
    parser.add_argument("--split", default="val", help="(default: val)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config")
    args = parse_with_settings(parser, argv)
    config = load_config(args.config, args.overrides)
    make_synthetic_data(config)
    ranks = rank_targets(config, args.split)
    print(f"{len(ranks)} expressions with a target of the split {args.split}; the target is among the")
    for count in FIRST:
        print(f"  first {count:3d}   {np.mean(ranks < count):.3f}")
    print(f"  all boxes   {np.mean(np.isfinite(ranks)):.3f}")
    return 0


def rank_targets(config: RunConfig, split: str) -> np.ndarray:
    """Return the rank, from 0, of the first box that fits a target of each expression; infinity: none fits."""
    dataset = open_split(config, split, BoxSource.DETECTIONS, training=False)
    reader = open_boxes_of(dataset, config.data, BoxSource.DETECTIONS)
    ranks = []
    for texts in dataset.groups:
        sample = dataset.sample(tuple(texts))
        [image] = sample.images
        candidates = reader.of_split(image.split_index).read(image.id)
        for text in sample.texts:
            if len(text.truth.boxes):
                ranks.append(rank_of_first(candidates, text.words, text.truth.boxes))
    if not ranks:
        raise UserError(f"The split {split} has no expression with a target; choose another one.")
    return np.array(ranks)


def rank_of_first(candidates: CandidateBoxes, words: str, targets: Sequence[Sequence[float]]) -> float:
    """Return the rank of the first candidate that fits one of the target boxes; infinity: none does."""
    phrases = candidates.phrases or ("",) * len(candidates.boxes)
    shares = np.array([match_phrase(phrase, words)[0] for phrase in phrases])
    order = np.lexsort((-candidates.predictions.scores, -shares))
    fits = (pairwise_iou(candidates.boxes[order], np.array(targets)) >= FIT).any(axis=1)
    return float(fits.argmax()) if fits.any() else np.inf


if __name__ == "__main__":
    sys.exit(main())
