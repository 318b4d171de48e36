"""Evaluate a trained run on any split with any source of boxes.

    e2e-vl evaluate --run runs/demo_refcoco --split val --boxes online --iou mattnet
    accelerate launch tools/evaluate.py --run runs/demo_refcoco --split val --boxes online --iou mattnet

Boxes: `gt` (all annotated boxes of the image are the candidates), `detections` (a file, MAttNet's format), `online`
(the model's own detector), or `precomputed` (boxes of the features file, for a run on precomputed features).
IoU conventions, all at 0.5 and all counted per expression:
  mattnet  xywh boxes, inclusive overlap, IoU >= 0.5: the protocol of MAttNet and most later papers
  vlbert   the official VL-BERT code: every extent + 1 pixel, prediction clamped to the image, IoU >= 0.5
  strict   mattnet's IoU, but > 0.5 (UNITER)
Prints accuracy, the ceiling (how often any candidate reaches the threshold) and both per family where the data names
families, with --loss also the loss, and writes predictions and metrics as JSON files of their own:
RUN/evaluations/SPLIT_BOXES.json and RUN/evaluations/SPLIT_BOXES_metrics.json, with the convention in the name if --iou
chooses one.
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
    parser.add_argument("--split", default="val", help="split of the data set (default: val)")
    parser.add_argument("--boxes", default="online", choices=BoxSource.for_evaluation())
    parser.add_argument("--iou", default=None, choices=("mattnet", "vlbert", "strict"), help="default: the run's")
    parser.add_argument("--loss", action="store_true", help="compute the loss too, as train.keep_best judges by it")
    parser.add_argument("--output", type=Path, help="predictions (default: a file in RUN/evaluations)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_intermixed_args(argv)
    load_config(find_model_folder(arguments.run) / "config.yaml", arguments.overrides)  # before torch is imported
    from e2e_vl.run.evaluate import evaluate_run  # late: it imports torch

    metrics, path = evaluate_run(
        arguments.run,
        split=arguments.split,
        boxes=arguments.boxes,
        iou=arguments.iou,
        output=arguments.output,
        overrides=arguments.overrides,
        with_loss=arguments.loss,
    )
    if path is not None:  # the main process
        for name, value in metrics.items():
            print(f"{name:45s} {value:.4f}" if isinstance(value, float) else f"{name:45s} {value}")
        print(f"predictions: {path}")
    return 0
