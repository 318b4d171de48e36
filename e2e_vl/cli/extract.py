"""Extract the regions of one image, with a picture, or region features of many images, in published formats.

    e2e-vl extract IMAGE --output DIR
    e2e-vl extract FOLDER --output FILE --format tsv
    e2e-vl extract --images instances.json --output FILE --format hdf5

The options differ for one image and for many images (a folder, or a list or COCO file given by --images); both follow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from detector.config import BACKENDS, SelectionRule
from detector.errors import MissingFileError, UserError
from detector.io import atomic_file, write_json
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import DEFAULT_SELECTIONS, DISPLAY_SELECTION, ExtractionSettings
from e2e_vl.data.features import FORMATS
from e2e_vl.io import write_png
from e2e_vl.samples import Question

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.extraction.regions import LoadedDetector

DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "detector" / "R_101_C4.yaml"
ONE_IMAGE = """Describe the regions of one image, and find what a phrase refers to.

    e2e-vl extract IMAGE --output DIR
    e2e-vl extract IMAGE --output DIR --run runs/demo_refcoco --text "the small red circle"

`python tools/extract_demo.py` is the same command for one image. It writes to DIR:
  regions.npz   boxes float32 [R, 4] (x1, y1, x2, y2 in pixels of the original image, after its EXIF rotation),
                scores float32 [R], classes int64 [R], features float32 [R, D]; best score first
  regions.png   the image with the boxes that are worth drawing by their scores, their classes and scores
  phrase.png, phrase.json   with --text: the box that the phrase refers to (null if there is no region), all candidates
                and their scores
Without --run, --detector or --weights the detector is a ResNet-101 C4 with random weights: it shows formats and speed.
"""
MANY_IMAGES = """Extract boxes, features, classes and attributes of many images, in published formats.

    e2e-vl extract DIR --output features --format npz --weights FILE --config FILE
    accelerate launch --num_processes 4 -m e2e_vl extract --images LIST.txt --output train.tsv --format tsv \\
        --rule maxconf --features-of proposal --min-boxes 10 --max-boxes 100
    e2e-vl extract --images instances.json --root DIR --boxes instances.json --output gt.h5 --format hdf5

Images: a folder, a text file with one path per line, or a COCO JSON file. After an interruption the same command
continues. Images that cannot be read are listed at the end and the exit code is 1; all others are done. After a repair,
the same command adds them.

Rules (--rule): score = VL-BERT's, detections by score; maxconf = bottom-up attention's; maxnms = the rule behind the 36
boxes of LXMERT. --boxes describes given boxes instead: COCO instances, COCO results, or MAttNet's detections; the
images must then be a COCO JSON file, so that the ids match.

Formats (--format): npz = a folder with one file per image; tsv = bottom-up attention's; lxmert = LXMERT's TSV, with
attributes; hdf5, lmdb = one file, needs pip install 'e2e-vl[features]'. e2e_vl/data/features.py describes and reads
them. Each records how it was made: config, hash of the weights, channel order, size, rule (for TSV: FILE.tsv.json).
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
    return (many_images if is_many else one_image)(words, prog)


def add_detector_options(parser: argparse.ArgumentParser, max_proposals: int | None) -> None:
    """The options that name a detector, see `load_source`."""
    named = parser.add_mutually_exclusive_group()
    named.add_argument("--detector", metavar="NAME", help="published weights by name, a run, a folder, or a file")
    named.add_argument("--weights", type=Path, help="detector weights: .pth, .pkl, .safetensors, or a folder")
    named.add_argument("--run", type=Path, help="trained run directory: its detector and its image size")
    parser.add_argument("--config", type=Path, help="Detectron2 YAML file (default: ResNet-101 C4)")
    parser.add_argument("--backend", choices=BACKENDS, help="detector (default: builtin, or the run's)")
    shown = "from the config" if max_proposals is None else max_proposals
    parser.add_argument(
        "--max-proposals", type=int, default=max_proposals, help=f"RPN proposals that are used (default: {shown})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights (default: 0)")


def load_source(options: argparse.Namespace) -> LoadedDetector:
    """The detector of `--detector`, of `--run`, or the one of `--config` and `--weights`."""
    if not (options.detector or options.run or options.config or DEFAULT_CONFIG.is_file()):
        raise MissingFileError(
            f"The default detector's settings, {DEFAULT_CONFIG}, come with a clone of the project and not with the "
            "installed package; name a detector with --detector, --config or --run."
        )
    from e2e_vl.extraction.regions import detector_of_run, find_detector, open_detector  # late: it imports torch

    common = {"backend": options.backend, "max_proposals": options.max_proposals}
    if options.detector is not None:
        return find_detector(options.detector, options.config, **common)
    if options.run is not None:
        return detector_of_run(options.run, **common)
    return open_detector(options.config or DEFAULT_CONFIG, options.weights, seed=options.seed, **common)


# One image


def one_image_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of tools/extract_demo.py."""
    parser = make_parser(ONE_IMAGE, prog)
    parser.add_argument("image", type=Path, help="any JPEG or PNG file")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    add_detector_options(parser, None)
    parser.add_argument("--text", help="a phrase; the run answers it, and the box that it refers to is drawn")
    parser.add_argument("--class-names", type=Path, help="text file with a line for each class (objects_vocab.txt)")
    parser.add_argument("--attribute-names", type=Path, help="the same for attributes, which are drawn then")
    shown = DISPLAY_SELECTION
    parser.add_argument("--min-score", type=float, default=shown.min_score, help="minimum score (default: %(default)s)")
    parser.add_argument("--min-regions", type=int, help=f"minimum number of regions (default: {shown.min_regions})")
    parser.add_argument(
        "--max-regions", type=int, default=shown.max_regions, help="maximum number of regions (default: %(default)s)"
    )
    return parser


@print_errors
def one_image(argv: list[str] | None = None, prog: str | None = None) -> int:
    """tools/extract_demo.py: regions.npz, regions.png, phrase.json and phrase.png."""
    options = one_image_parser(prog).parse_args(argv)
    if options.text is not None and options.run is None:
        raise UserError("--text needs --run, the directory of a trained run; train one with tools/train.py.")
    most, least = options.max_regions, options.min_regions
    rule = SelectionRule(options.min_score, min(DISPLAY_SELECTION.min_regions, most) if least is None else least, most)
    source = load_source(options)
    from e2e_vl.api.model import (
        TrainedDetector,  # late: they import torch
        to_image_file,
    )

    source = source.named(options.class_names, options.attribute_names)
    if source.warning:
        print(source.warning)
    found = TrainedDetector(source).find(to_image_file(options.image), None, rule)
    path = options.output / "regions.npz"
    options.output.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("wb") as file:
        np.savez(file, boxes=found.boxes, scores=found.scores, classes=found.classes, features=found.features)
    write_png(options.output / "regions.png", found.draw())
    print(f"{len(found)} regions with {found.features.shape[1]} features each: {path}")
    if options.text is not None:
        from e2e_vl.api.model import load  # imports transformers, which takes seconds

        model = load(options.run)
        if not model.network.task.predicts_box:
            raise UserError(f"{options.run}: the task '{model.settings.task.name}' does not answer with a box.")
        [answer] = model.answer_questions([Question(options.image, options.text)])
        shown = {"image": str(options.image), "text": options.text, "box": answer.box, "score": answer.score}
        shown |= {"boxes": answer.prediction.candidate_boxes, "scores": answer.prediction.candidate_scores}
        write_json(options.output / "phrase.json", {key: np.asarray(value).tolist() for key, value in shown.items()})
        write_png(options.output / "phrase.png", answer.draw())
        if answer.unknown_words:
            print(f"words not in the vocabulary: {', '.join(answer.unknown_words)}")
        where = "fits no region" if answer.box is None else f"is at {answer.answer} (score {answer.score:.2f})"
        print(f'"{options.text}" {where}: {options.output / "phrase.png"}')
    return 0


# Many images


def many_images_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options for many images."""
    parser = make_parser(MANY_IMAGES, prog)
    parser.add_argument("--images", type=Path, required=True, help="folder, list (.txt), or COCO file (.json)")
    parser.add_argument("--root", type=Path, help="folder that listed paths start from (default: the list's)")
    parser.add_argument("--output", type=Path, required=True, help="folder (npz) or file to write")
    parser.add_argument("--format", default="npz", choices=FORMATS)
    add_detector_options(parser, 300)
    parser.add_argument("--precision", default="no", choices=("no", "bf16", "fp16"), help="mixed precision")
    parser.add_argument(
        "--rule", default="score", choices=tuple(DEFAULT_SELECTIONS), help="which boxes (default: score)"
    )
    parser.add_argument("--num-boxes", type=int, help="a fixed number of boxes: the same --min-boxes and --max-boxes")
    parser.add_argument("--min-boxes", type=int, help="at least this many, if the detector proposes them")
    parser.add_argument("--max-boxes", type=int, help="at most this many")
    parser.add_argument("--min-score", type=float, help="threshold of the rules score and maxconf")
    parser.add_argument(
        "--nms-threshold",
        type=float,
        default=0.3,
        help="IoU of the rule maxconf's NMS per class (default: %(default)s)",
    )
    parser.add_argument("--boxes", type=Path, help="describe the boxes of this file, in place of all rules")
    parser.add_argument("--features-of", choices=("proposal", "final"), help="default: proposal (for score: final)")
    parser.add_argument("--attributes", action="store_true", help="most probable attribute of each region")
    parser.add_argument("--image-feature", action="store_true", help="also the feature of the whole image (not in TSV)")
    parser.add_argument("--batch-size", type=int, default=8, help="images of one size in one pass (default: 8)")
    parser.add_argument("--workers", type=int, default=2, help="reading processes per process (default: 2)")
    return parser


@print_errors
def many_images(argv: list[str] | None = None, prog: str | None = None) -> int:
    """A folder or file of region features."""
    options = many_images_parser(prog).parse_args(argv)
    settings = extraction_settings(options)
    from e2e_vl.data.user_inputs import list_images, read_given_boxes

    images = list_images(options.images, options.root)
    given = None if options.boxes is None else read_given_boxes(options.boxes)
    from e2e_vl.extraction.bulk import MAX_WAIT, ExtractionJob, extract_images, make_stamp  # late: torch
    from e2e_vl.run.launch import make_accelerator

    source = load_source(options)
    job = ExtractionJob(
        images=images,
        output=options.output,
        layout=options.format,
        source=source,
        settings=settings,
        given=given,
        stamp=make_stamp(source, settings, boxes_file=options.boxes, precision=options.precision),
        batch_size=options.batch_size,
        workers=options.workers,
    )
    accelerator = make_accelerator(options.precision, max_wait_minutes=MAX_WAIT.total_seconds() / 60)
    summary = extract_images(job, accelerator)
    if accelerator.is_main_process:
        if source.warning and (given is None or source.weights is None):
            print(source.warning)
        existing = f", {summary.existing} already existed" if summary.existing else ""
        print(f"{summary.extracted} images extracted{existing}: {options.output}")
        if summary.below_minimum:
            print(f"{summary.below_minimum} of them have fewer than {settings.selection_rule.min_regions} regions.")
        if summary.failures:
            print(f"{len(summary.failures)} images could not be described:", file=sys.stderr)
        for image_id, reason in summary.failures.items():
            print(f"  {image_id}: {reason}", file=sys.stderr)
    return 1 if summary.failures else 0


def extraction_settings(options: argparse.Namespace) -> ExtractionSettings:
    """The options about boxes and features."""
    attributes = options.attributes or options.format == "lxmert"
    if options.format in ("tsv", "lxmert") and options.image_feature:
        raise UserError("The TSV formats have no place for the whole image's feature; choose npz, hdf5 or lmdb.")
    if options.boxes is not None:
        return ExtractionSettings("given", attributes=attributes, image_feature=options.image_feature)
    default = DEFAULT_SELECTIONS[options.rule]
    if options.num_boxes is not None:
        least = most = options.num_boxes
    else:
        least = default.min_regions if options.min_boxes is None else options.min_boxes
        most = max(default.max_regions, least) if options.max_boxes is None else options.max_boxes
        least = min(least, most) if options.min_boxes is None else least
    return ExtractionSettings(
        options.rule,
        SelectionRule(default.min_score if options.min_score is None else options.min_score, least, most),
        options.features_of or ("final" if options.rule == "score" else "proposal"),
        attributes,
        options.image_feature,
        options.nms_threshold,
    )
