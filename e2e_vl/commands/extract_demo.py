"""Describe the regions of one image, and find what a phrase refers to.

    e2e-vl extract IMAGE --output DIR
    e2e-vl extract IMAGE --output DIR --run runs/demo_refcoco --text "the small red circle"

`python tools/extract_demo.py` is the same command. It writes to DIR:
  regions.npz   boxes float32 [R, 4] (x1, y1, x2, y2 in pixels of the original image, after its EXIF rotation),
                scores float32 [R], classes int64 [R], features float32 [R, D]; best score first
  regions.png   the image with the boxes that score at least 0.05, their classes (where the names are known) and scores
  phrase.png, phrase.json   with --text: the box that the phrase refers to (null if there is no region), all candidates
                and their scores
Without --run or --weights the detector is a ResNet-101 C4 with random weights: it shows formats and speed only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from detector.choices import BACKENDS
from detector.selection_rule import SelectionRule
from e2e_vl.command_line import make_parser, says_errors
from e2e_vl.commands.named_detector import load_source
from e2e_vl.drawing import draw_boxes

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.extraction.single import ImageRegions

WORTH_DRAWING = 0.05  # least score of a box in the picture: regions that only fill up the number say nothing


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("image", type=Path, help="any JPEG or PNG file")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--detector", help="a run, a saved detector's folder, or a weights file with its --config")
    parser.add_argument("--config", type=Path, help="Detectron2 YAML file (default: ResNet-101 C4, or the run's)")
    parser.add_argument("--weights", type=Path, help="detector weights: a file of any kind, or a folder")
    parser.add_argument("--backend", choices=BACKENDS, help="detector (default: builtin, or the run's)")
    parser.add_argument("--run", type=Path, help="trained run directory: its detector is used, and it answers --text")
    parser.add_argument("--text", help="a phrase; the box that it refers to is drawn (needs --run)")
    parser.add_argument("--min-score", type=float, default=0.2, help="least score of a region (default: 0.2) ...")
    parser.add_argument("--min-regions", type=int, help="... but at least this many are kept (default: 10)")
    parser.add_argument("--max-regions", type=int, default=36, help="and at most this many (default: 36)")
    parser.add_argument("--max-proposals", type=int, default=100, help="RPN proposals that are used (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights (default: 0)")
    return parser


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_args(argv)
    if arguments.text is not None and arguments.run is None:
        raise ValueError("--text needs --run, the directory of a trained run; train one with tools/train.py.")
    least, most = arguments.min_regions, arguments.max_regions
    if least is not None and least > most:
        raise ValueError(f"--min-regions {least} is more than --max-regions {most}; lower the one or raise the other.")
    rule = SelectionRule(arguments.min_score, min(10, most) if least is None else least, most)
    source = load_source(arguments)
    if source.warning:
        print(source.warning)
    from e2e_vl.extraction.single import extract_image  # late: it imports torch

    found = extract_image(arguments.image, source, rule)

    regions, path = found.regions, arguments.output / "regions.npz"
    arguments.output.mkdir(parents=True, exist_ok=True)
    np.savez(path, boxes=regions.boxes, scores=regions.scores, classes=regions.classes, features=regions.features)
    shown = np.flatnonzero(regions.scores >= WORTH_DRAWING)
    names = source.detector.class_names
    named = ["" if names is None else names[regions.classes[row]] for row in shown]
    labels = [f"{name} {regions.scores[row]:.2f}".strip() for name, row in zip(named, shown, strict=True)]
    save_picture(arguments.output / "regions.png", found, regions.boxes[shown], labels)
    if len(regions) == 0:
        print("The detector found no region at all; the arrays are empty.")
    print(f"{len(regions)} regions with {regions.features.shape[1]} features each: {path}")
    if arguments.text is not None:
        ground(arguments, found)
    return 0


def ground(arguments: argparse.Namespace, found: ImageRegions) -> None:
    """Write phrase.json and phrase.png."""
    from e2e_vl.api.trained_model import load  # imports transformers, which takes seconds

    model = load(arguments.run)
    model.require_boxes()
    record = model.ask(arguments.image, arguments.text).record
    answer = {"image": str(arguments.image), "text": arguments.text, "box": record["box"], "score": record["score"]}
    answer |= {"boxes": record["candidate_boxes"], "scores": record["candidate_scores"]}
    path = arguments.output / "phrase.json"
    path.write_text(json.dumps(answer, indent=2, default=lambda array: array.tolist()) + "\n", encoding="utf-8")
    if answer["box"] is None:
        save_picture(arguments.output / "phrase.png", found, [], [], title=f"{arguments.text}: nothing found")
        print(f'Nothing in this image fits "{arguments.text}": the run\'s detector found no region ({path}).')
        return
    label = f"{record['class'] or ''} {record['score']:.2f}".strip()
    save_picture(arguments.output / "phrase.png", found, [answer["box"]], [label], title=arguments.text)
    x1, y1, x2, y2 = (round(float(value), 1) for value in answer["box"])
    place = f"x {x1} to {x2}, y {y1} to {y2} (score {record['score']:.2f})"
    print(f'"{arguments.text}" is at {place}: {arguments.output / "phrase.png"}')


def save_picture(
    path: Path, found: ImageRegions, boxes: np.ndarray | list[list[float]], labels: list[str], title: str | None = None
) -> None:
    """Draw boxes, given in pixels of the original image, on the image that the detector saw."""
    from detector.images import resize_boxes  # late: it imports torch

    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    boxes = resize_boxes(boxes, found.regions.image_size, found.pixels.shape[:2])
    Image.fromarray(draw_boxes(found.pixels, boxes, labels, title=title)).save(path)
