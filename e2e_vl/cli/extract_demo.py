"""Describe the regions of one image, and find what a phrase refers to.

    e2e-vl extract IMAGE --output DIR
    e2e-vl extract IMAGE --output DIR --run runs/demo_refcoco --text "the small red circle"

`python tools/extract_demo.py` is the same command. It writes to DIR:
  regions.npz   boxes float32 [R, 4] (x1, y1, x2, y2 in pixels of the original image, after its EXIF rotation),
                scores float32 [R], classes int64 [R], features float32 [R, D]; best score first
  regions.png   the image with the boxes that are worth drawing by their scores, their classes and scores
  phrase.png, phrase.json   with --text: the box that the phrase refers to (null if there is no region), all candidates
                and their scores
Without --run or --weights the detector is a ResNet-101 C4 with random weights: it shows formats and speed only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from detector.config import BACKENDS, SelectionRule
from detector.errors import MissingFileError, UserError
from detector.io import atomic_file, write_json
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.extraction.settings import SHOWN
from e2e_vl.io import write_png
from e2e_vl.samples import Question

# The detector that the options of a command name.


if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.extraction.regions import LoadedDetector

DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "detector" / "R_101_C4.yaml"


def load_source(arguments: argparse.Namespace) -> LoadedDetector:
    """The detector of `--detector`; or of `--run`; or the one of `--config` and `--weights`, which beat the run's.

    Raises:
        FileNotFoundError, ValueError: a file is missing or does not fit; see e2e_vl/extraction/regions.py.
    """
    if arguments.detector is not None:
        if arguments.weights is not None:
            raise UserError("--detector and --weights both name weights; leave one of them out.")
        from e2e_vl.extraction.regions import find_detector  # late: it imports torch

        return find_detector(
            arguments.detector,
            arguments.config,
            backend=arguments.backend,
            max_proposals=arguments.max_proposals,
        )
    if arguments.run is None and arguments.config is None and not DEFAULT_CONFIG.is_file():
        raise MissingFileError(
            f"The default detector's settings, {DEFAULT_CONFIG}, come with a clone of the project and not with the "
            "installed package; name a detector with --config or --run."
        )
    from e2e_vl.extraction.regions import detector_of_run, open_detector  # late: it imports torch

    if arguments.run is not None and arguments.config is None and arguments.weights is None:
        return detector_of_run(arguments.run, backend=arguments.backend, max_proposals=arguments.max_proposals)
    return open_detector(
        arguments.config or DEFAULT_CONFIG,
        arguments.weights,
        backend=arguments.backend or "builtin",
        max_proposals=arguments.max_proposals,
        seed=arguments.seed,
    )


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("image", type=Path, help="any JPEG or PNG file")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--detector", metavar="NAME", help="published weights by name, a run, a folder, or a file")
    parser.add_argument("--config", type=Path, help="Detectron2 YAML file (default: ResNet-101 C4, or the run's)")
    parser.add_argument("--weights", type=Path, help="detector weights: a file of any kind, or a folder")
    parser.add_argument("--backend", choices=BACKENDS, help="detector (default: builtin, or the run's)")
    parser.add_argument("--run", type=Path, help="trained run directory: its detector is used, and it answers --text")
    parser.add_argument("--text", help="a phrase; the box that it refers to is drawn (needs --run)")
    parser.add_argument("--class-names", type=Path, help="text file with a line for each class (objects_vocab.txt)")
    parser.add_argument("--attribute-names", type=Path, help="the same for attributes, which are drawn then")
    parser.add_argument(
        "--min-score",
        type=float,
        default=SHOWN.min_score,
        help=f"least score of a region (default: {SHOWN.min_score}) ...",
    )
    parser.add_argument(
        "--min-regions", type=int, help=f"... but at least this many are kept (default: {SHOWN.min_regions})"
    )
    parser.add_argument(
        "--max-regions",
        type=int,
        default=SHOWN.max_regions,
        help=f"and at most this many (default: {SHOWN.max_regions})",
    )
    parser.add_argument("--max-proposals", type=int, help="RPN proposals that are used (default: as the config says)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights (default: 0)")
    return parser


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_args(argv)
    if arguments.text is not None and arguments.run is None:
        raise UserError("--text needs --run, the directory of a trained run; train one with tools/train.py.")
    if arguments.text is not None and getattr(arguments, "detector", None) is not None:
        raise UserError("--text is answered by the run with its own detector; leave --detector out.")
    least, most = arguments.min_regions, arguments.max_regions
    if least is not None and least > most:
        raise UserError(f"--min-regions {least} is more than --max-regions {most}; lower the one or raise the other.")
    rule = SelectionRule(arguments.min_score, min(SHOWN.min_regions, most) if least is None else least, most)
    source = load_source(arguments)
    from e2e_vl.api.detector import TrainedDetector
    from e2e_vl.api.inputs import image_file  # late: it imports torch
    from e2e_vl.extraction.regions import with_names

    source = with_names(source, arguments.class_names, arguments.attribute_names)
    if source.warning:
        print(source.warning)
    found = TrainedDetector(source).find(image_file(arguments.image), None, rule)

    path = arguments.output / "regions.npz"
    arguments.output.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("wb") as file:
        np.savez(file, boxes=found.boxes, scores=found.scores, classes=found.classes, features=found.features)
    write_png(arguments.output / "regions.png", found.draw())
    if len(found) == 0:
        print("The detector found no region at all; the arrays are empty.")
    print(f"{len(found)} regions with {found.features.shape[1]} features each: {path}")
    if arguments.text is not None:
        ground(arguments)
    return 0


def ground(arguments: argparse.Namespace) -> None:
    """Write phrase.json and phrase.png."""
    from e2e_vl.api.model import load  # imports transformers, which takes seconds

    model = load(arguments.run)
    model.require_boxes()
    [answer], _ = model.replies([Question(arguments.image, arguments.text)])
    record = answer.record
    shown = {"image": str(arguments.image), "text": arguments.text, "box": record["box"], "score": record["score"]}
    shown |= {"boxes": record["candidate_boxes"], "scores": record["candidate_scores"]}
    path, picture = arguments.output / "phrase.json", arguments.output / "phrase.png"
    write_json(path, {name: np.asarray(value).tolist() for name, value in shown.items()})
    write_png(picture, answer.draw())
    if answer.unknown_words:
        print(f"words that the vocabulary lacks: {', '.join(answer.unknown_words)}")
    if answer.box is None:
        print(f'Nothing in this image fits "{arguments.text}": the run\'s detector found no region ({path}).')
        return
    print(f'"{arguments.text}" is at {answer.answer} (score {answer.score:.2f}): {picture}')
