"""Predictions of a trained run: a file for a server or a leaderboard, or answers to texts about images.

    e2e-vl predict split --run RUN --split test2015 --boxes online --output vqa.json
    e2e-vl predict split --run RUN --rationale-run RUN --split test --boxes gt --output vcr.csv
    accelerate launch tools/predict.py split --run RUN --split testA --boxes detections --output refcoco.json
    python tools/predict.py ask --run RUN --image IMAGE --text "the small red circle" --output DIR

split writes what the task's server or the literature expects, in the order of the data set:
  VQA      JSON list of {"question_id", "answer"}
  VCR      CSV of 21 columns; --run chooses answers, --rationale-run rationales (given each of the four answers)
  RefCOCO  JSON list of {"ref_id", "sent_id", "box"}, the box as [x1, y1, x2, y2] in pixels of the stored image
  GQA      JSON list of {"questionId", "prediction"}
  NLVR2    CSV of lines identifier,True or identifier,False, without a header
  Flickr30K Entities  JSON list of {"image", "sentence", "phrases"}, each phrase with "id", "phrase", "box" and "score"
Where the split has labels, the metrics are printed too; with two runs also Q->A, QA->R and Q->AR. Settings behind the
options (key=value) hold for both runs.

ask prints the answers to texts about images; `ask --help` shows more examples.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from e2e_vl.cli import ask
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.config import BoxSource, check_overrides
from e2e_vl.io import model_folder


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    shape: dict[str, Any] = {"formatter_class": parser.formatter_class}
    kinds = parser.add_subparsers(dest="command", required=True)
    split = kinds.add_parser("split", help="predictions of a whole split as a file", description=__doc__, **shape)
    add_split_options(split)
    split.set_defaults(action=write_split)
    one = kinds.add_parser("ask", help="images and texts in, answers out", description=ask.__doc__, **shape)
    ask.add_options(one)
    one.set_defaults(action=ask.ask)
    return parser


def add_split_options(parser: argparse.ArgumentParser) -> None:
    """The options about a whole split."""
    parser.add_argument("--run", type=Path, required=True, help="run directory of tools/train.py, or a saved model")
    parser.add_argument("--rationale-run", type=Path, help="VCR: the run that chooses rationales")
    parser.add_argument("--split", required=True, help="split of the data set, such as test")
    parser.add_argument("--boxes", required=True, choices=BoxSource.for_evaluation())
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_args(argv)
    arguments.action(arguments)
    return 0


def write_split(arguments: argparse.Namespace) -> None:
    model_folder(arguments.run)
    check_overrides(arguments.overrides)
    from e2e_vl.run.predict import predict_split  # late: it imports torch

    metrics, is_main = predict_split(
        arguments.run,
        split=arguments.split,
        boxes=arguments.boxes,
        output=arguments.output,
        second_run_dir=arguments.rationale_run,
        overrides=arguments.overrides,
    )
    if not is_main:
        return
    for name, value in metrics.items():
        print(f"{name:45s} {value:.4f}")
    if not any("accuracy" in name for name in metrics):
        print(f"The split {arguments.split} has no labels, so nothing is scored.")
    print(f"predictions: {arguments.output}")
