"""Diagnose a trainable detector: what do its region features know, and where does the gradient get lost?

    e2e-vl probe --run runs/my_run
    e2e-vl probe --run runs/frozen runs/trained --split val --output probe

Linear probes read the class and the attributes of annotated objects off the features of their boxes: of each stage of
the backbone, of the region feature that goes to the encoder, and of the encoder's states. Where texts or phrases name
an annotated object, they also read them off these words, before and in the encoder. Checkpoints of a run
(train.save_total_limit keeps more of them), its best model and the model that it started from are points of a curve.
On some training batches, the gradient of each stage is compared with its weights, and with the update that the
optimiser makes. All runs are probed on the same boxes: those of the first run, or of another config (--data).

Writes to --output: probe.html (everything on one page), probe.json, probe.csv, gradients.csv and pictures. See
docs/analysis.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from detector.errors import UserError
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.config_files import load_config
from e2e_vl.io import find_model_folder


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = make_parser(__doc__, prog)
    run_help = "run directories of e2e-vl train, or saved models"
    parser.add_argument("--run", required=True, nargs="+", metavar="RUN", help=run_help)
    parser.add_argument("--split", default="val", help="split of the data set (default: val)")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="CONFIG",
        help="config with the data to use instead of the first run's; images are resized as in each run",
    )
    images_help = "use only this many images of the split (default: 800)"
    parser.add_argument("--max-images", type=positive, default=800, metavar="N", help=images_help)
    models_help = "use only this many models of each run, spread evenly over its steps (default: 8)"
    parser.add_argument("--max-checkpoints", type=positive, default=8, metavar="N", help=models_help)
    batches_help = "training batches whose gradients are measured; 0: none (default: 8)"
    parser.add_argument("--gradient-batches", type=int, default=8, metavar="N", help=batches_help)
    parser.add_argument("--output", type=Path, help="output folder (default: RUN/probe of the first run)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    return parser


def positive(text: str) -> int:
    """Read a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    args = parse_with_settings(build_parser(prog), argv)
    runs = [Path(word) for word in args.run if "=" not in word]
    overrides = [word for word in args.run if "=" in word] + args.overrides  # settings may follow the runs
    if not runs:
        raise UserError("--run needs a run directory of e2e-vl train, or a saved model.")
    run_overrides = overrides
    if args.data is not None:  # the settings under `data` come from that config
        run_overrides = [word for word in overrides if not word.startswith("data.")]
        data_overrides = [word for word in overrides if word.startswith("data.")]
        load_config(args.data, [*data_overrides, "output=unused"])
    for run in runs:
        config = load_config(find_model_folder(run) / "config.yaml", run_overrides)  # before torch is imported
        if config.detector.backend == "precomputed":
            raise UserError(f"{run} was trained on precomputed features, so there is no detector to probe.")
    from e2e_vl.analysis.probe import ProbeArguments, probe_runs  # late: imports torch

    arguments = ProbeArguments(
        runs=tuple(runs),
        split=args.split,
        output=args.output,
        data=args.data,
        max_images=args.max_images,
        max_checkpoints=args.max_checkpoints,
        gradient_batches=args.gradient_batches,
        overrides=tuple(overrides),
    )
    results, page = probe_runs(arguments)
    for line in results.summary_lines():
        print(line)
    print(f"page: {page}")
    return 0
