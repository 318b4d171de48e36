"""Extract the regions of one image, with a picture, or region features of many images in published formats.

    e2e-vl extract IMAGE --output DIR
    e2e-vl extract FOLDER --output FILE --format tsv
    e2e-vl extract --images instances.json --output FILE --format hdf5

One image and many images (a folder, or --images with a list or a COCO file) have different options; both follow.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from detector.config import BACKENDS, SelectionRule
from detector.errors import UserError
from detector.io import atomic_file, write_json
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.cli.processes import add_process_options, run_in_processes
from e2e_vl.config import DEFAULT_SELECTIONS, DISPLAY_SELECTION, ExtractionConfig, RunDetectorConfig
from e2e_vl.data.features import FORMATS
from e2e_vl.data.user_images import ImageFile, find_images
from e2e_vl.io import write_png
from e2e_vl.samples import Question

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.api.model import ImageRegions, TrainedModel
    from e2e_vl.extraction.regions import LoadedDetector

ONE_IMAGE = """Describe the regions of one image, and find what a phrase refers to.

    e2e-vl extract IMAGE --output DIR
    e2e-vl extract IMAGE --output DIR --run runs/demo_refcoco --text "the small red circle"

`python tools/extract_demo.py` is the same command. It writes to DIR, or for several images to DIR/0001, DIR/0002, ...:
  regions.npz   boxes float32 [R, 4] (x1, y1, x2, y2 in pixels of the original image, after its EXIF rotation),
                scores float32 [R], classes int64 [R], features float32 [R, D]; best score first
  regions.png   the image with its boxes, classes and scores, except boxes with very low scores
  phrase.png, phrase.json   with --text: the box that the phrase refers to (null if there is no region), all candidates
                and their scores
Without --run, --detector or --weights the detector is a ResNet-101 C4 with random weights, to try formats and speed.
"""
MANY_IMAGES = """Extract boxes, features, classes and attributes of many images, in published formats.

    e2e-vl extract FOLDER --output features --format npz --weights FILE --config FILE
    e2e-vl extract --num-processes 4 --images LIST.txt --output train.tsv --format tsv \\
        --rule maxconf --features-of proposal --min-boxes 10 --max-boxes 100
    e2e-vl extract --images instances.json --root DIR --boxes instances.json --output gt.h5 --format hdf5

Images: a folder, a text file with one path per line, or a COCO JSON file. Run the same command again to continue after
an interruption. Unreadable images are skipped and listed at the end, with exit status 1; once they are repaired, the
same command adds them.

Rules (--rule): score = VL-BERT's, detections by score; maxconf = bottom-up attention's; maxnms = the rule behind
LXMERT's 36 boxes. --boxes takes boxes from a file instead: COCO instances, COCO results, or MAttNet's detections;
--images must then be a COCO JSON file, so that the ids match.

Formats (--format): npz = a folder with one file per image; tsv = bottom-up attention's; lxmert = LXMERT's TSV, with
attributes; hdf5, lmdb = one file, needs pip install 'e2e-vl[features]'. See e2e_vl/data/features.py. Each stores how it
was made: config, hash of the weights, channel order, size, rule (for TSV: in FILE.tsv.json).
"""


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__, one_image_parser(prog).format_help(), many_images_parser(prog).format_help(), sep="\n\n")
        return 0
    if words and Path(words[0]).is_dir():
        words = ["--images", *words]
    is_many = any(word.partition("=")[0] == "--images" for word in words)
    if is_many:
        return many_images(words, prog)
    return one_image(words, prog)


def add_detector_options(parser: argparse.ArgumentParser, max_proposals: int | None) -> None:
    """Add the options that name a detector, see `load_source`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--detector", metavar="NAME", help="published weights by name, a run, a folder, or a file")
    source.add_argument("--weights", type=Path, help="detector weights: .pth, .pkl, .safetensors, or a folder")
    source.add_argument("--run", type=Path, help="trained run directory: use its detector and its image size")
    parser.add_argument("--config", type=Path, help="Detectron2 YAML file (default: ResNet-101 C4)")
    parser.add_argument("--backend", choices=BACKENDS, help="detector implementation (default: builtin, or the run's)")
    default = "from the config" if max_proposals is None else max_proposals
    proposals_help = f"number of RPN proposals (default: {default})"
    parser.add_argument("--max-proposals", type=int, default=max_proposals, help=proposals_help)
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights (default: 0)")


def load_source(
    args: argparse.Namespace, class_names: Path | None = None, attribute_names: Path | None = None
) -> LoadedDetector:
    """Load the detector of `--detector`, of `--run`, or of `--config` and `--weights`.

    For the files of names, see `open_detector`.
    """
    from e2e_vl.extraction.regions import detector_of_run, find_detector, open_detector  # late: imports torch

    common = {
        "backend": args.backend,
        "max_proposals": args.max_proposals,
        "class_names": class_names,
        "attribute_names": attribute_names,
    }
    if args.detector is not None:
        return find_detector(args.detector, args.config, **common)
    if args.run is not None:
        return detector_of_run(args.run, **common)
    return open_detector(args.config or RunDetectorConfig().config, args.weights, seed=args.seed, **common)


# One image


def one_image_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of tools/extract_demo.py and of `e2e-vl extract IMAGE`."""
    parser = make_parser(ONE_IMAGE, prog)
    parser.add_argument("image", nargs="+", help="image file, address, or pattern such as 'photos/*.jpg'")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    add_detector_options(parser, None)
    parser.add_argument("--text", help="phrase to find in the image with --run")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: the CUDA GPU if there is one)")
    parser.add_argument("--class-names", type=Path, help="text file with one class per line (objects_vocab.txt)")
    parser.add_argument("--attribute-names", type=Path, help="likewise for attributes, which are then drawn")
    default = DISPLAY_SELECTION
    parser.add_argument(
        "--min-score",
        type=float,
        help=f"keep exactly the regions from this score on (default: {default.min_score}, within the limits below)",
    )
    parser.add_argument(
        "--min-regions",
        type=int,
        help=f"minimum number of regions (default: {default.min_regions}, with --min-score none)",
    )
    parser.add_argument(
        "--max-regions",
        type=int,
        help=f"maximum number of regions (default: {default.max_regions}, with --min-score none)",
    )
    return parser


@print_errors
def one_image(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run tools/extract_demo.py: write regions.npz, regions.png, phrase.json and phrase.png."""
    args = one_image_parser(prog).parse_args(argv)
    if args.text is not None and args.run is None:
        raise UserError("--text needs --run, the directory of a trained run; train one with `e2e-vl train`.")
    images = find_images(args.image)
    rule = DISPLAY_SELECTION.with_stated(args.min_score, args.min_regions, args.max_regions)
    source = load_source(args, args.class_names, args.attribute_names)
    from e2e_vl.api.detector import TrainedDetector  # late: imports torch

    if source.warning:
        print(source.warning)
    detector = TrainedDetector(source, args.device)
    model = None
    if args.text is not None:
        from e2e_vl.api.model import load  # imports transformers, which takes seconds

        model = load(args.run, args.device)
        if not model.network.task.predicts_box:
            raise UserError(f"{args.run}: the task '{model.config.task.name}' does not answer with a box.")
    for number, image in enumerate(images, start=1):
        folder = args.output
        if len(images) > 1:
            folder /= f"{number:04d}"
        regions = detector.find_regions(image, None, rule)
        write_regions(folder, regions)
        if regions.warning and regions.warning != source.warning:
            print(f"warning: {regions.warning}")
        if model is not None:
            write_phrase(folder, model, image, args.text)
    return 0


def write_regions(folder: Path, regions: ImageRegions) -> None:
    """Write regions.npz and regions.png."""
    path = folder / "regions.npz"
    with atomic_file(path) as part, part.open("wb") as file:
        np.savez(file, boxes=regions.boxes, scores=regions.scores, classes=regions.classes, features=regions.features)
    write_png(folder / "regions.png", regions.draw())
    print(f"{len(regions)} regions with {regions.features.shape[1]} features each: {path}")


def write_phrase(folder: Path, model: TrainedModel, image: ImageFile, text: str) -> None:
    """Write phrase.json and phrase.png."""
    [answer] = model.answer_questions([Question(image, text)])
    content = {
        "image": str(image),
        "text": text,
        "box": answer.box,
        "score": answer.score,
        "boxes": answer.prediction.candidate_boxes,
        "scores": answer.prediction.candidate_scores,
        "is_unsure": answer.is_unsure,
    }
    write_json(folder / "phrase.json", {key: np.asarray(value).tolist() for key, value in content.items()})
    write_png(folder / "phrase.png", answer.draw())
    for warning in answer.warnings:
        print(f"warning: {warning}")
    where = "fits no region" if answer.box is None else f"is at {answer.text}"
    unsure = ", unsure" if answer.is_unsure else ""
    print(f'"{text}" {where} (score {answer.score:.2f}{unsure}): {folder / "phrase.png"}')


# Many images


def many_images_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = make_parser(MANY_IMAGES, prog)
    parser.add_argument("--images", type=Path, required=True, help="folder, list (.txt), or COCO file (.json)")
    parser.add_argument("--root", type=Path, help="folder that listed paths start from (default: the list's)")
    parser.add_argument("--output", type=Path, required=True, help="folder (npz) or file to write")
    parser.add_argument("--format", default="npz", choices=FORMATS)
    add_detector_options(parser, 300)
    parser.add_argument("--precision", default="no", choices=("no", "bf16", "fp16"), help="mixed precision")
    parser.add_argument(
        "--rule", default="score", choices=tuple(DEFAULT_SELECTIONS), help="how boxes are selected (default: score)"
    )
    parser.add_argument("--num-boxes", type=int, help="fixed number of boxes: sets --min-boxes and --max-boxes")
    parser.add_argument("--min-boxes", type=int, help="minimum number of boxes, if there are enough proposals")
    parser.add_argument("--max-boxes", type=int, help="maximum number of boxes")
    parser.add_argument(
        "--min-score",
        type=float,
        help="keep exactly the boxes from this score on, within the limits that are given (rules score and maxconf)",
    )
    parser.add_argument(
        "--nms-threshold",
        type=float,
        default=0.3,
        help="IoU threshold of NMS with the rule maxconf (default: %(default)s)",
    )
    parser.add_argument("--boxes", type=Path, help="file of boxes to use instead of predicted boxes")
    features_help = "box that features are pooled from (default: proposal; with the rule score: final)"
    parser.add_argument("--features-of", choices=("proposal", "final"), help=features_help)
    parser.add_argument("--attributes", action="store_true", help="store the most probable attribute of each region")
    parser.add_argument("--image-feature", action="store_true", help="store the whole image's feature (not in TSV)")
    parser.add_argument("--batch-size", type=int, default=8, help="images per batch, all of one size (default: 8)")
    parser.add_argument("--workers", type=int, default=2, help="data workers per process (default: 2)")
    add_process_options(parser)
    return parser


@functools.partial(print_errors, advice="Repeat the command to continue.")
def many_images(argv: list[str] | None = None, prog: str | None = None) -> int:
    args = many_images_parser(prog).parse_args(argv)
    settings = extraction_settings(args)
    from e2e_vl.data.user_inputs import list_images, read_given_boxes, warn_of_given_boxes_outside

    images = list_images(args.images, args.root)
    given_boxes = None
    if args.boxes is not None:
        given_boxes = read_given_boxes(args.boxes)
    status = run_in_processes(args, "extract", argv)
    if status is not None:
        return status
    if given_boxes is not None:
        warn_of_given_boxes_outside(given_boxes, images, str(args.boxes))
    from e2e_vl.extraction.bulk import MAX_WAIT, ExtractionJob, extract_images, make_stamp  # late: imports torch
    from e2e_vl.run.launch import make_accelerator

    source = load_source(args)
    job = ExtractionJob(
        images=images,
        output=args.output,
        layout=args.format,
        source=source,
        settings=settings,
        given_boxes=given_boxes,
        stamp=make_stamp(source, settings, boxes_file=args.boxes, precision=args.precision),
        batch_size=args.batch_size,
        workers=args.workers,
    )
    accelerator = make_accelerator(args.precision, max_wait_minutes=MAX_WAIT.total_seconds() / 60)
    summary = extract_images(job, accelerator)
    if accelerator.is_main_process:
        if source.warning and (given_boxes is None or source.weights is None):
            print(source.warning)
        existing = f", {summary.existing} already existed" if summary.existing else ""
        print(f"{summary.extracted} images extracted{existing}: {args.output}")
        if summary.below_minimum:
            print(f"{summary.below_minimum} of them have fewer than {settings.selection_rule.min_regions} regions.")
        if summary.failures:
            print(f"{len(summary.failures)} images could not be extracted:", file=sys.stderr)
        for image_id, reason in summary.failures.items():
            print(f"  {image_id}: {reason}", file=sys.stderr)
    return 1 if summary.failures else 0


def extraction_settings(args: argparse.Namespace) -> ExtractionConfig:
    """Return the settings of boxes and features that the options ask for."""
    attributes = args.attributes or args.format == "lxmert"
    if args.format in ("tsv", "lxmert") and args.image_feature:
        raise UserError("The TSV formats cannot store the whole image's feature; choose npz, hdf5 or lmdb.")
    options = {"--min-score": args.min_score, "--min-boxes": args.min_boxes, "--max-boxes": args.max_boxes}
    limits = [option for option, value in options.items() if value is not None]
    if args.boxes is not None:
        if args.num_boxes is not None:
            limits.append("--num-boxes")
        if limits:
            raise UserError(f"--boxes gives the boxes, so nothing is selected; leave out {', '.join(limits)}.")
        return ExtractionConfig("given", attributes=attributes, image_feature=args.image_feature)
    if args.num_boxes is not None and limits:
        raise UserError(f"--num-boxes fixes the number of boxes; leave it out, or {', '.join(limits)}.")
    selection = DEFAULT_SELECTIONS[args.rule]
    if args.num_boxes is None:
        selection = selection.with_stated(args.min_score, args.min_boxes, args.max_boxes)
    else:
        selection = SelectionRule(selection.min_score, args.num_boxes, args.num_boxes)
    features_of = args.features_of
    if features_of is None:
        features_of = "final" if args.rule == "score" else "proposal"
    return ExtractionConfig(
        args.rule,
        selection,
        features_of,
        attributes,
        args.image_feature,
        args.nms_threshold,
    )
