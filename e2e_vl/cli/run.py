"""Train a model, evaluate it and write its predictions: `e2e-vl train`, `e2e-vl evaluate`, `e2e-vl predict`."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.cli.processes import add_process_options, run_in_processes
from e2e_vl.config import BoxSource, check_batch_size
from e2e_vl.config_files import load_config, read_detector_config
from e2e_vl.io import find_model_folder, refuse_to_overwrite

TRAIN = """Train detector, encoder and task together.

    e2e-vl train --config configs/demo/refcoco.yaml train.lr=1e-3 output=runs/my_run
    e2e-vl train --num-processes 4 --config configs/demo/refcoco.yaml train.lr=1e-3 output=runs/my_run
    accelerate launch tools/train.py --config configs/demo/refcoco.yaml train.lr=1e-3 output=runs/my_run

`key=value` settings override the file. `--resume` continues the run in `output` exactly. `--num-processes` starts one
process per GPU, or several on the CPU; `accelerate launch` and `torchrun` do so on several machines. SIGTERM, SIGHUP
and Ctrl-C finish the current step, save a checkpoint and exit with status 143, 129 or 130; errors exit with status 2.
`--draw-schedule PNG` only draws the learning rates and the weights of objectives over the steps of a run with
`train.max_steps`.
"""
EVALUATE = """Evaluate a trained run on any split with any source of boxes.

    e2e-vl evaluate --run runs/demo_refcoco --split val --boxes online --iou mattnet
    e2e-vl evaluate --num-processes 4 --run runs/demo_refcoco --split val --boxes online --iou mattnet
    accelerate launch tools/evaluate.py --run runs/demo_refcoco --split val --boxes online --iou mattnet

Candidate boxes: `gt` (all annotated boxes of the image), `detections` (a file in MAttNet's format or of COCO's
results), `online` (predicted by the model's detector), or `precomputed` (from the features file, for a run on
precomputed features).
IoU conventions for referring expressions, all with threshold 0.5:
  mattnet  xywh boxes, inclusive overlap, IoU >= 0.5: the protocol of MAttNet and most later papers
  vlbert   the official VL-BERT code: every extent + 1 pixel, prediction clamped to the image, IoU >= 0.5
  strict   mattnet's IoU, but > 0.5 (UNITER)
Prints the metrics of the task and, with --loss, the loss. For referring expressions, these are the accuracy and the
ceiling (how often any candidate is correct), also for each family of expressions if the data name families. Writes
predictions to RUN/evaluations/SPLIT_BOXES.json and metrics to RUN/evaluations/SPLIT_BOXES_metrics.json; with --iou,
both names contain the convention.
"""
PREDICT = """Write the predictions of a trained run for a split, as a file for an evaluation server or leaderboard.

    e2e-vl predict --run RUN --split test2015 --boxes online --output vqa.json
    e2e-vl predict --run RUN --rationale-run RUN --split test --boxes gt --output vcr.csv
    e2e-vl predict --num-processes 4 --run RUN --split testA --boxes detections --output refcoco.json

Formats (predictions keep the order of the data set):
  VQA      JSON list of {"question_id", "answer"}
  VCR      CSV with 21 columns; --run chooses answers, --rationale-run rationales (given each of the four answers)
  RefCOCO  JSON list of {"ref_id", "sent_id", "box"}, the box as [x1, y1, x2, y2] in pixels of the original image
  GQA      JSON list of {"questionId", "prediction"}
  NLVR2    CSV of lines identifier,True or identifier,False, without a header
  Flickr30K Entities  JSON list of {"image", "sentence", "phrases"}, each phrase with "id", "phrase", "box" and "score"
If the split has labels, metrics are printed too, with two runs also Q->A, QA->R and Q->AR. key=value settings apply to
both runs.
"""


@functools.partial(print_errors, advice="--resume continues from the newest checkpoint.")
def train(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(TRAIN, prog)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the run directory's newest checkpoint")
    parser.add_argument("--draw-schedule", type=Path, metavar="PNG", help="draw the schedule instead of training")
    add_process_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    args = parse_with_settings(parser, argv)
    config = load_config(args.config, args.overrides)
    read_detector_config(config.detector)  # errors before torch is imported
    if args.draw_schedule is not None:
        from e2e_vl.run.report import draw_schedule  # late: imports torch

        draw_schedule(config, args.draw_schedule)
        return 0
    if not args.resume and os.environ.get("RANK", "0") == "0":
        refuse_to_overwrite(Path(config.output))  # likewise
    status = run_in_processes(args, "train", argv, functools.partial(check_batch_size, config))
    if status is not None:
        return status
    # suppress DDP's warning on every process that find_unused_parameters found none
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from e2e_vl.run.train import train as train_run  # late: imports torch

    train_run(config, resume=args.resume)
    return 0


@print_errors
def evaluate(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(EVALUATE, prog)
    parser.add_argument("--run", type=Path, required=True, help="run directory of e2e-vl train, or a saved model")
    parser.add_argument("--split", default="val", help="split of the data set (default: val)")
    boxes_help = "source of candidate boxes (default: online)"
    parser.add_argument("--boxes", default="online", choices=[*map(str, BoxSource.for_evaluation())], help=boxes_help)
    iou_help = "IoU convention (default: the run's)"
    parser.add_argument("--iou", default=None, choices=("mattnet", "vlbert", "strict"), help=iou_help)
    parser.add_argument(
        "--loss", action="store_true", help="also compute the loss, which train.metric_for_best_model can use"
    )
    parser.add_argument("--output", type=Path, help="file of predictions (default: in RUN/evaluations)")
    add_process_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    args = parse_with_settings(parser, argv)
    load_config(find_model_folder(args.run) / "config.yaml", args.overrides)  # before torch is imported
    status = run_in_processes(args, "evaluate", argv)
    if status is not None:
        return status
    from e2e_vl.run.evaluate import evaluate_run  # late: imports torch

    metrics, path = evaluate_run(
        args.run,
        split=args.split,
        boxes=args.boxes,
        iou=args.iou,
        output=args.output,
        overrides=args.overrides,
        with_loss=args.loss,
    )
    if path is not None:  # the main process
        for name, value in metrics.items():
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
            print(f"{name:45s} {text}")
        print(f"predictions: {path}")
    return 0


@print_errors
def predict(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(PREDICT, prog)
    parser.add_argument("--run", type=Path, required=True, help="run directory of e2e-vl train, or a saved model")
    parser.add_argument("--rationale-run", type=Path, help="VCR: the run that chooses rationales")
    parser.add_argument("--split", required=True, help="split of the data set, such as test")
    parser.add_argument(
        "--boxes", required=True, choices=[*map(str, BoxSource.for_evaluation())], help="source of candidate boxes"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    add_process_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    args = parse_with_settings(parser, argv)
    load_config(find_model_folder(args.run) / "config.yaml", args.overrides)  # before torch is imported
    status = run_in_processes(args, "predict", argv)
    if status is not None:
        return status
    from e2e_vl.run.evaluate import predict_split  # late: imports torch

    metrics, is_main = predict_split(
        args.run,
        split=args.split,
        boxes=args.boxes,
        output=args.output,
        second_run_dir=args.rationale_run,
        overrides=args.overrides,
    )
    if is_main:
        for name, value in metrics.items():
            print(f"{name:45s} {value:.4f}")
        if not any("accuracy" in name for name in metrics):
            print(f"The split {args.split} has no labels, so there are no metrics.")
        print(f"predictions: {args.output}")
    return 0
