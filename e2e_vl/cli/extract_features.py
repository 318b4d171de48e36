"""Extract region features of many images: boxes, features, classes and attributes, in the formats of the field.

    e2e-vl extract DIR --output features --format npz --weights FILE --config FILE
    accelerate launch --num_processes 4 tools/extract_features.py --images LIST.txt --output train.tsv --format tsv \\
        --rule maxconf --features-of proposal --min-boxes 10 --max-boxes 100
    e2e-vl extract --images instances.json --root DIR --boxes instances.json --output gt.h5 \\
        --format hdf5

`e2e-vl` runs one process, tools/extract_features.py is the same command for several.

Images: a folder, a text file with one path per line, or a COCO JSON file. After an interruption the same command goes
on. Images that cannot be read are listed at the end and the exit code is 1; all others are done. After a repair, the
same command adds them.

Rules (--rule): score = VL-BERT's, detections by score; maxconf = bottom-up attention's; maxnms = the rule behind the 36
boxes of LXMERT. --boxes describes given boxes instead: COCO instances, COCO results, or MAttNet's detections; the
images must then be a COCO JSON file, so that the ids fit.

Formats (--format): npz = a folder with one file per image; tsv = bottom-up attention's; lxmert = LXMERT's TSV, needs
--attributes; hdf5, lmdb = one file, needs pip install 'e2e-vl[features]'. e2e_vl/data/features.py
describes and reads them. Each says how it was made: config, hash of the weights, channel order, size, rule (for TSV:
FILE.tsv.json).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detector.config import BACKENDS, SelectionRule
from detector.errors import UserError
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.cli.extract_demo import load_source
from e2e_vl.data.features import FORMATS
from e2e_vl.data.user_inputs import list_images, read_given_boxes
from e2e_vl.extraction.settings import DEFAULTS, ExtractionSettings

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.extraction.bulk import ExtractionJob, ExtractionSummary


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("--images", type=Path, required=True, help="folder, list (.txt), or COCO file (.json)")
    parser.add_argument("--root", type=Path, help="folder that listed paths start from (default: the list's)")
    parser.add_argument("--output", type=Path, required=True, help="folder (npz) or file to write")
    parser.add_argument("--format", default="npz", choices=FORMATS)
    parser.add_argument("--detector", metavar="NAME", help="published weights by name, a run, a folder, or a file")
    parser.add_argument("--config", type=Path, help="Detectron2 YAML file (default: ResNet-101 C4)")
    parser.add_argument("--weights", type=Path, help="detector weights: .pth, .pkl, .safetensors, or a folder")
    parser.add_argument("--run", type=Path, help="trained run directory: its detector and its image size")
    parser.add_argument("--backend", choices=BACKENDS, help="detector (default: builtin, or the run's)")
    parser.add_argument("--precision", default="no", choices=("no", "bf16", "fp16"), help="mixed precision")
    parser.add_argument("--rule", default="score", choices=tuple(DEFAULTS), help="which boxes (default: score)")
    parser.add_argument("--num-boxes", type=int, help="a fixed number of boxes")
    parser.add_argument("--min-boxes", type=int, help="at least this many, if the detector proposes them")
    parser.add_argument("--max-boxes", type=int, help="at most this many")
    parser.add_argument("--min-score", type=float, help="threshold of the rules score and maxconf")
    parser.add_argument("--nms-threshold", type=float, help="IoU of the rule maxconf's NMS per class (default: 0.3)")
    parser.add_argument("--boxes", type=Path, help="describe the boxes of this file instead")
    parser.add_argument("--features-of", choices=("proposal", "final"), help="default: proposal (for score: final)")
    parser.add_argument("--attributes", action="store_true", help="most probable attribute of each region")
    parser.add_argument("--image-feature", action="store_true", help="also the feature of the whole image (not in TSV)")
    parser.add_argument("--max-proposals", type=int, default=300, help="RPN proposals that are used (default: 300)")
    parser.add_argument("--batch-size", type=int, default=8, help="images of one size in one pass (default: 8)")
    parser.add_argument("--workers", type=int, default=2, help="reading processes per process (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights (default: 0)")
    return parser


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_args(argv)
    settings = extraction_settings(arguments)
    images = list_images(arguments.images, arguments.root)
    given = None if arguments.boxes is None else read_given_boxes(arguments.boxes)

    from e2e_vl.extraction.bulk import LONGEST_WAIT, ExtractionJob, extract_images, make_stamp
    from e2e_vl.run.launch import make_accelerator

    source = load_source(arguments)
    job = ExtractionJob(
        images=images,
        output=arguments.output,
        layout=arguments.format,
        source=source,
        settings=settings,
        given=given,
        stamp=make_stamp(source, settings, boxes_file=arguments.boxes, precision=arguments.precision),
        batch_size=arguments.batch_size,
        workers=arguments.workers,
    )
    accelerator = make_accelerator(arguments.precision, max_wait_minutes=LONGEST_WAIT.total_seconds() / 60)
    summary = extract_images(job, accelerator)
    if accelerator.is_main_process:
        show(job, summary)
    return 1 if summary.failures else 0


def show(job: ExtractionJob, summary: ExtractionSummary) -> None:
    """Print what was done, and what was not."""
    if job.source.warning and (job.given is None or job.source.weights is None):
        print(job.source.warning)
    before = f", {summary.before} were there before" if summary.before else ""
    print(f"{summary.done} images described{before}: {job.output}")
    if summary.few:
        least = job.settings.numbers.min_regions
        print(f"{summary.few} of them have fewer than {least} regions: the detector proposed no more.")
    if summary.failures:
        print(f"{len(summary.failures)} images could not be described:", file=sys.stderr)
        for image_id, reason in summary.failures.items():
            print(f"  {image_id}: {reason}", file=sys.stderr)


def extraction_settings(arguments: argparse.Namespace) -> ExtractionSettings:
    """The options about boxes and features.

    Raises:
        ValueError: options that contradict each other.
    """
    numbers = (arguments.num_boxes, arguments.min_boxes, arguments.max_boxes, arguments.min_score)
    if arguments.boxes is not None and any(value is not None for value in (*numbers, arguments.features_of)):
        raise UserError("--boxes describes exactly the given boxes; leave out the options that choose boxes.")
    if arguments.boxes is not None and arguments.images.suffix != ".json":
        raise UserError("--boxes finds the boxes of an image by its id: give a COCO JSON file as --images.")
    if arguments.num_boxes is not None and (arguments.min_boxes, arguments.max_boxes) != (None, None):
        raise UserError("Give either --num-boxes or --min-boxes and --max-boxes.")
    if arguments.format == "lxmert" and not arguments.attributes:
        raise UserError("LXMERT's TSV holds attributes: add --attributes, or choose another format.")
    if arguments.format in ("tsv", "lxmert") and arguments.image_feature:
        raise UserError("The TSV formats have no place for the whole image's feature; choose npz, hdf5 or lmdb.")
    if arguments.run is not None and (arguments.config, arguments.weights, arguments.detector) != (None, None, None):
        raise UserError("Give either --run, or --detector, or --config and --weights.")
    kept = {"attributes": arguments.attributes, "image_feature": arguments.image_feature}
    if arguments.boxes is not None:
        return ExtractionSettings(rule="given", **kept)
    if arguments.nms_threshold is not None:
        if arguments.rule != "maxconf":
            raise UserError("--nms-threshold belongs to --rule maxconf; leave it out.")
        kept["nms_threshold"] = arguments.nms_threshold
    default = DEFAULTS[arguments.rule]
    least = first_given(arguments.num_boxes, arguments.min_boxes, default.min_regions)
    most = first_given(arguments.num_boxes, arguments.max_boxes, max(default.max_regions, least))
    if arguments.min_boxes is None:
        least = min(least, most)
    return ExtractionSettings(
        rule=arguments.rule,
        selection=SelectionRule(first_given(arguments.min_score, default.min_score), least, most),
        features_of=arguments.features_of or ("final" if arguments.rule == "score" else "proposal"),
        **kept,
    )


def first_given(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
