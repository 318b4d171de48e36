"""Read the annotation files of a run before training: what is wrong and where, how large all is, what was seen before.

    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA
    e2e-vl check-data --config configs/refcoco/vl_bert_base.yaml data.root=DATA \\
        --with configs/pretraining/vl_bert_base_e2e.yaml \\
        --visual-genome image_data.json --detector-images VG_train.txt

Names every malformed record of every file of the splits that are trained on and evaluated, not only the first; counts
images, missing image files, texts, texts beyond data.max_text_length, boxes, classes and answers; and says which images
of the evaluated splits occur in the training split, in the training splits of other configs (--with) and among the
training images of the detector (--detector-images). Photos are found again by COCO's ids in file names, and by Visual
Genome's with --visual-genome, which also says which of them are photos of COCO.

The exit status is 1 if there are problems, and with --no-overlap if photos are shared. Images are not opened, and those
in archives not looked for. `python tools/check_data.py` is the same command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from detector.errors import UserError
from detector.io import write_text
from e2e_vl.cli.common import make_parser, says_errors
from e2e_vl.config import load_config

if TYPE_CHECKING:
    from e2e_vl.run.data_check import DataReport
    from e2e_vl.run.split_walk import SplitFacts


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument(
        "--with",
        dest="others",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file of another run, such as pre-training, whose training images are compared; may be repeated",
    )
    parser.add_argument(
        "--detector-images",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="training images of the detector: COCO's JSON, Visual Genome's image_data.json, or a list of paths or "
        "ids; may be repeated",
    )
    parser.add_argument(
        "--detector-ids",
        choices=("coco", "vg"),
        help="whose ids the lists hold where names do not tell",
    )
    parser.add_argument(
        "--visual-genome", type=Path, metavar="FILE", help="Visual Genome's image_data.json, with COCO's ids"
    )
    parser.add_argument("--images", type=int, metavar="N", help="look at N images of each split (default: all)")
    parser.add_argument("--processes", type=int, metavar="N", help="for large splits (default: see docs/real_data.md)")
    parser.add_argument("--examples", type=int, default=3, metavar="N", help="problems shown of each kind (default: 3)")
    parser.add_argument("--no-overlap", action="store_true", help="shared photos are problems too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found, all problems too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that beat the file")
    return parser


@says_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    options = build_parser(prog).parse_intermixed_args(argv)
    for name in ("images", "processes", "examples"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise UserError(f"--{name} is {number}; give a positive number.")
    config = load_config(options.config, [*options.overrides, "output=unused"])
    others = [(str(path), load_config(path, ["output=unused"])) for path in options.others]
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from e2e_vl.data.overlap import PhotoIds, read_visual_genome  # late: they import numpy, torch and transformers
    from e2e_vl.run.data_check import check_data

    start = time.perf_counter()
    photo_ids = PhotoIds(None if options.visual_genome is None else read_visual_genome(options.visual_genome))
    detector_photos = None
    if options.detector_images:
        lists = (photo_ids.of_list(path, options.detector_ids) for path in options.detector_images)
        detector_photos = {one for photos in lists for ids in photos for one in ids}
    report = check_data(
        config,
        others=others,
        photo_ids=photo_ids,
        detector_photos=detector_photos,
        max_images=options.images,
        processes=options.processes,
    )
    print("\n".join([*as_lines(report, options.examples), f"{time.perf_counter() - start:.0f} seconds"]))
    if options.json is not None:
        content = {**dataclasses.asdict(report), "config": str(options.config), "overrides": options.overrides}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return int(bool(report.problems or (options.no_overlap and report.overlaps)))


def as_lines(report: DataReport, examples: int) -> list[str]:
    """The report as text: sizes, photos that are shared, problems."""
    lines = []
    for facts in report.splits:
        lines += _lines_of_split(facts, "words" if report.counts_words else "wordpieces")
    for overlap in report.overlaps:
        shown = ", ".join(overlap.examples)
        lines.append(
            f"SHARED: {overlap.number:,} of {overlap.of:,} photos of {overlap.split} are in {overlap.elsewhere} "
            f"(such as {shown})"
        )
    kinds = report.alike()
    for kind in kinds:
        lines += [f"PROBLEM: {sentence}" for sentence in kind[:examples]]
        if len(kind) > examples:
            lines.append(f"  ... and {len(kind) - examples:,} more of this kind")
    number = len(report.problems)
    lines.append(f"{number:,} problems of {len(kinds)} kinds" if number else "no problem found")
    return lines


def _lines_of_split(facts: SplitFacts, unit: str) -> list[str]:
    purpose = "trained on" if facts.is_trained else "evaluated"
    share = "" if facts.looked_at == 1 else f" in {facts.looked_at:.1%} of all images, which are looked at,"
    photos = "" if facts.photos == facts.images else f" of {facts.photos:,} different photos"
    lines = [
        f"{facts.split} ({purpose}): {facts.texts:,} texts;{share} {facts.images:,} images{photos}, "
        f"{facts.missing_images:,} image files missing"
    ]
    cut = f"; {facts.too_long:,} too long" if facts.too_long else ""
    lines.append(f"  texts: {facts.mean_length:.1f} {unit} on average, at most {facts.longest}{cut}")
    if facts.too_long:
        lines.append(f"    such as: {facts.too_long_example}")
    if facts.images_without_boxes is not None:
        kinds = "" if facts.classes is None else f" of {facts.classes:,} classes"
        lines.append(
            f"  boxes: {facts.boxes:,}{kinds}; {facts.empty_boxes:,} empty, {facts.boxes_outside:,} reach outside "
            f"their image; {facts.images_without_boxes:,} images have none"
        )
    if facts.boxes_outside:
        lines.append(f"    such as: {facts.boxes_outside_example}")
    if facts.answers is not None:
        lines.append(
            f"  answers: {facts.answers:,} in the list; {facts.texts_without_known_answer:,} texts have none of them"
        )
    return lines
