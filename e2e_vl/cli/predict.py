"""Write the predictions of a trained run for a whole split, as a file for an evaluation server or leaderboard.

    e2e-vl predict --run RUN --split test2015 --boxes online --output vqa.json
    e2e-vl predict --run RUN --rationale-run RUN --split test --boxes gt --output vcr.csv
    accelerate launch -m e2e_vl predict --run RUN --split testA --boxes detections --output refcoco.json

Formats, with predictions in the order of the data set:
  VQA      JSON list of {"question_id", "answer"}
  VCR      CSV of 21 columns; --run chooses answers, --rationale-run rationales (given each of the four answers)
  RefCOCO  JSON list of {"ref_id", "sent_id", "box"}, the box as [x1, y1, x2, y2] in pixels of the original image
  GQA      JSON list of {"questionId", "prediction"}
  NLVR2    CSV of lines identifier,True or identifier,False, without a header
  Flickr30K Entities  JSON list of {"image", "sentence", "phrases"}, each phrase with "id", "phrase", "box" and "score"
If the split has labels, the metrics are printed too; with two runs also Q->A, QA->R and Q->AR. key=value settings apply
to both runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from e2e_vl.cli.common import make_parser, print_errors
from e2e_vl.config import BoxSource, load_config
from e2e_vl.io import find_model_folder


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("--run", type=Path, required=True, help="run directory of tools/train.py, or a saved model")
    parser.add_argument("--rationale-run", type=Path, help="VCR: the run that chooses rationales")
    parser.add_argument("--split", required=True, help="split of the data set, such as test")
    parser.add_argument("--boxes", required=True, choices=BoxSource.for_evaluation())
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    options = build_parser(prog).parse_intermixed_args(argv)
    load_config(find_model_folder(options.run) / "config.yaml", options.overrides)  # before torch is imported
    from e2e_vl.run.evaluate import predict_split  # late: it imports torch

    metrics, is_main = predict_split(
        options.run,
        split=options.split,
        boxes=options.boxes,
        output=options.output,
        second_run_dir=options.rationale_run,
        overrides=options.overrides,
    )
    if is_main:
        for name, value in metrics.items():
            print(f"{name:45s} {value:.4f}")
        if not any("accuracy" in name for name in metrics):
            print(f"The split {options.split} has no labels, so nothing is scored.")
        print(f"predictions: {options.output}")
    return 0
