"""Let an object detector of transformers propose boxes, for training and for questions about images.

    e2e-vl detect FOLDER --model PekingU/rtdetr_v2_r50vd --output boxes.json
    e2e-vl detect FOLDER --model IDEA-Research/grounding-dino-tiny --text person dog "red car" --output boxes.json
    e2e-vl detect instances.json --root IMAGES --model openmmlab-community/mm_grounding_dino_tiny_o365v1_goldg_v3det \\
        --expressions 'refs(unc).p' --max-boxes 10 --output boxes.json

Any model of AutoModelForObjectDetection (DETR, RT-DETR, D-FINE, RF-DETR, ...) or of
AutoModelForZeroShotObjectDetection (Grounding DINO, MM-Grounding-DINO, OWLv2, ...) will do: a name on the Hugging Face
hub, or a folder. A zero-shot detector looks for what --text names, or for each expression of a file of REFER, one pass
each; then only images with expressions are read.

Images: a folder, a text file with one path per line, or a COCO JSON file, whose ids the boxes then have.

The output is a list in COCO's results format with the class (category_id, category_name) or the phrase of each box.
It serves as data.files.detections of a run, and as --boxes of `e2e-vl ask` and `e2e-vl extract`. Run the same command
again to continue after an interruption. Unreadable images are skipped and listed at the end, with exit status 1; once
they are repaired, the same command adds them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from detector.errors import UserError, user_path
from detector.image_files import read_image
from detector.io import write_text
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import ProposalRule
from e2e_vl.data.refcoco import read_refs
from e2e_vl.data.user_inputs import ListedImage, list_images
from e2e_vl.io import read_text
from e2e_vl.registry import decode

if TYPE_CHECKING:  # at run time it would import torch
    from e2e_vl.extraction.proposers import Proposals, Proposer

Prompts = list[list[str]]  # the phrases of each pass over an image
DETECTOR_WITH_CLASSES: Prompts = [[]]  # one pass without phrases


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    rule = ProposalRule()
    parser = make_parser(__doc__, prog)
    parser.add_argument("images", help="folder, text file with one path per line, or COCO JSON file")
    parser.add_argument("--root", type=Path, help="folder of the listed images (default: that of the list)")
    parser.add_argument("--model", required=True, help="detector: a name on the Hugging Face hub, or a folder")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    prompts = parser.add_mutually_exclusive_group()
    text_help = "what a zero-shot detector looks for, or a .txt file with one phrase per line"
    prompts.add_argument("--text", nargs="+", metavar="PHRASE", help=text_help)
    prompts.add_argument("--expressions", type=Path, metavar="FILE", help="file of REFER, such as 'refs(unc).p'")
    for name, text in (
        ("min_score", "lowest score of a box; the best one stays in any case"),
        ("max_boxes", "most boxes of a pass"),
        ("nms_threshold", "of boxes with a higher IoU, the better one stays"),
    ):
        default = getattr(rule, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{text} (default: {default})")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or mps (default: the CUDA GPU if there is one)")
    args = parser.parse_args(argv)
    lines_file = args.output.with_name(f"{args.output.name}.lines")
    if args.output.exists() and not lines_file.exists():
        raise UserError(f"{args.output} exists; remove it, or choose another output.")
    options = {"min_score": args.min_score, "max_boxes": args.max_boxes, "nms_threshold": args.nms_threshold}
    rule = decode(options, ProposalRule, "detect")
    images, prompts_of = list_prompts(args)
    settings = {"model": args.model, **options, "text": args.text, "expressions": str(args.expressions)}
    log = DetectionLog(lines_file, settings)
    from e2e_vl.extraction.proposers import load_proposer  # late: imports torch
    from e2e_vl.run.devices import choose_device

    device = choose_device(args.device)
    proposer = load_proposer(args.model)
    has_prompts = args.text is not None or args.expressions is not None
    if proposer.takes_text and not has_prompts:
        raise UserError(f"{args.model} looks for phrases; name them with --text, or give --expressions.")
    if has_prompts and not proposer.takes_text:
        raise UserError(f"{args.model} has classes of its own; leave out --text and --expressions.")
    proposer.network.to(device)
    failures = propose_boxes(proposer, rule, images, prompts_of, log)
    detections: list[dict[str, Any]] = []
    for image in images:
        detections += log.detections.get(image.id, ())
    rows = ",\n".join(map(json.dumps, detections))  # there may be millions
    write_text(args.output, f"[\n{rows}\n]\n")
    if not failures:
        log.path.unlink(missing_ok=True)
    print(f"{len(detections)} boxes of {len(images) - len(failures)} images: {args.output}")
    for image_id, reason in failures.items():
        print(f"{image_id}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def list_prompts(args: argparse.Namespace) -> tuple[list[ListedImage], Mapping[str, Prompts]]:
    """Return the images to read, and the passes over each of them by its id."""
    images = list_images(args.images, args.root)
    if args.expressions is None:
        passes = DETECTOR_WITH_CLASSES
        if args.text is not None:
            passes = [read_phrases(args.text)]
        return images, dict.fromkeys((image.id for image in images), passes)
    expressions: dict[str, dict[str, None]] = {}  # of each image, without repeats
    for ref in read_refs(args.expressions):
        words = (sentence.sent for sentence in ref.expressions)
        expressions.setdefault(str(ref.image_id), {}).update(dict.fromkeys(words))
    images = [image for image in images if image.id in expressions]
    if not images:
        raise UserError(f"{args.expressions}: no expression is about one of {args.images}; give a COCO JSON file.")
    return images, {image.id: [[words] for words in expressions[image.id]] for image in images}


def read_phrases(words: Sequence[str]) -> list[str]:
    """Return the phrases of --text, or of the file that it names."""
    if len(words) == 1 and words[0].endswith(".txt"):
        words = read_text(user_path(words[0])).splitlines()
    phrases = [word.strip() for word in words if word.strip()]
    if not phrases:
        raise UserError("--text names nothing to look for; give at least one phrase.")
    return phrases


class DetectionLog:
    """The detections of the images that are finished, one line each, so that a stopped command loses none.

    Args:
        path: the file; its first line states the settings, which must be equal when the command continues.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self.detections: dict[str, list[dict[str, Any]]] = {}  # by image id
        if not path.is_file():
            return
        whole_lines = path.read_bytes().rpartition(b"\n")[0]  # the last line may be cut off
        os.truncate(path, len(whole_lines) + 1)
        first, *lines = whole_lines.split(b"\n")
        if json.loads(first) != settings:
            raise UserError(f"{path} was begun with other settings; use them, remove it, or choose another output.")
        for line in lines:
            image_id, detections = json.loads(line)
            self.detections[image_id] = detections

    def add(self, image_id: str, detections: list[dict[str, Any]]) -> None:
        """Keep the detections of an image, on disk too."""
        self.detections[image_id] = detections
        is_new = not self.path.is_file()
        with self.path.open("a", encoding="utf-8") as file:
            if is_new:
                file.write(json.dumps(self.settings) + "\n")
            file.write(json.dumps([image_id, detections]) + "\n")


def propose_boxes(
    proposer: Proposer,
    rule: ProposalRule,
    images: Sequence[ListedImage],
    prompts_of: Mapping[str, Prompts],
    log: DetectionLog,
) -> dict[str, str]:
    """Add the detections of all images to the log; returns why images could not be read, by their ids."""
    failures = {}
    for image in tqdm(images, unit="image", delay=1):
        if image.id in log.detections:
            continue
        try:
            picture = read_image(image.path, str(image.path), image.annotated_size)
        except (ValueError, OSError) as error:
            failures[image.id] = str(error)
            continue
        detections: list[dict[str, Any]] = []
        for phrases in prompts_of[image.id]:
            proposals = proposer.propose(picture, rule, phrases)
            detections += to_records(image.id, proposals, has_classes=not phrases)
        log.add(image.id, detections)
    return failures


def to_records(image_id: str, proposals: Proposals, *, has_classes: bool) -> Iterator[dict[str, Any]]:
    """Yield boxes as entries of COCO's results format, with their classes or else their phrases."""
    is_number = image_id.isdecimal() and str(int(image_id)) == image_id
    scores = proposals.scores.tolist()
    columns = zip(proposals.boxes.tolist(), scores, proposals.text_labels, proposals.labels.tolist(), strict=True)
    for (x1, y1, x2, y2), score, name, label in columns:
        record = {
            "image_id": int(image_id) if is_number else image_id,
            "bbox": [round(x1, 2), round(y1, 2), round(x2 - x1, 2), round(y2 - y1, 2)],
            "score": round(score, 5),
        }
        if has_classes:
            record |= {"category_id": label, "category_name": name}
        else:
            record["phrase"] = name
        yield record
