"""Convert the export of an annotation tool to the boxes and expressions that configs/own_data train on.

    e2e-vl convert-annotations EXPORT --expressions expressions.csv --output own_data

EXPORT is COCO JSON (CVAT, Label Studio, Roboflow), LabelMe's JSON files, Pascal VOC's XML files (LabelImg), YOLO's
text files with data.yaml, classes.txt or obj.names, or a CSV file with the columns image, label, x, y, width, height.
The images are in OUTPUT/images, or in --images. Expressions have the columns image, box (the id in COCO JSON, else the
number in its file) and text. See docs/your_own_data.md. Writes OUTPUT/instances.json, OUTPUT/refs.json and the page
OUTPUT/boxes.html with the boxes drawn on the images, and prints the command that trains on them.
"""

from __future__ import annotations

import itertools
import logging
import random
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask

from detector.errors import UserError, user_path
from detector.io import write_json
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.data.annotation_tools import ImageFolder, Remarks, Row, read_boxes, read_rows
from e2e_vl.data.tables import list_examples

logger = logging.getLogger(__name__)

MIN_IOU = 0.5  # of the box that an expression states, and the annotated box that it means


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("export", type=Path, help="file or folder to read")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--images", type=Path, help="folder of the images (default: images in --output)")
    parser.add_argument("--expressions", type=Path, help="CSV or JSON file of expressions")
    parser.add_argument("--val", type=float, default=0.2, help="share of images in the split val (default: 0.2)")
    parser.add_argument("--skip-missing", action="store_true", help="leave out annotations of images that are missing")
    args = parser.parse_args(argv)
    if not 0 <= args.val <= 1:
        raise UserError(f"--val {args.val} is not a share between 0 and 1.")
    source = user_path(args.export)
    image_folder = ImageFolder(user_path(args.images or args.output / "images"))
    instances_path = args.output / "instances.json"
    refs_path = args.output / "refs.json"
    remarks = Remarks(source)
    # what an earlier conversion wrote in the same folder
    ignored = [path for path in (instances_path, refs_path) if path != source]
    boxes = read_boxes(source, image_folder, remarks, skip_missing=args.skip_missing, ignored=ignored)
    rows: list[Row] = []
    row_remarks = Remarks(source)
    if args.expressions is not None:
        row_remarks = Remarks(user_path(args.expressions))
        rows = read_rows(row_remarks.source, row_remarks)
        if not rows:
            row_remarks.raise_errors()
            raise UserError(f"{row_remarks.source} has no expressions.")
    instances, refs = convert(boxes, rows, image_folder, args.val, row_remarks, skip_missing=args.skip_missing)
    write_json(instances_path, instances)
    write_json(refs_path, refs)
    page = _write_page(args.output / "boxes.html", instances, refs, image_folder, [remarks, row_remarks])
    split_of = {ref["image_id"]: ref["split"] for ref in refs}
    splits = Counter(split_of.values())
    num_expressions = sum(len(ref["sentences"]) for ref in refs)
    print(
        f"{len(instances['images'])} images, {len(instances['annotations'])} boxes of "
        f"{len(instances['categories'])} categories, {num_expressions} expressions about {len(refs)} boxes in "
        f"{dict(splits)} images"
    )
    if refs:
        images = None if args.images is None else image_folder.path
        print(_training_command(args.output, images, len(instances["categories"]), sorted(splits)))
    else:
        print("Images have several boxes of each category and no expressions about them; give --expressions.")
    print(page)
    return 0


def _training_command(root: Path, images: Path | None, num_classes: int, splits: Sequence[str]) -> str:
    words = ["e2e-vl", "train", "--config", "configs/own_data/refcoco.yaml", f"data.root={root}"]
    if images is not None:
        words.append(f"data.files.images={images.absolute()}")
    words.append(f"detector.overrides.MODEL.ROI_HEADS.NUM_CLASSES={num_classes}")
    words.append(f"data.eval_splits=[{', '.join(splits)}]")
    return shlex.join(words)


def _write_page(
    path: Path, instances: dict, refs: list[dict], image_folder: ImageFolder, all_remarks: Iterable[Remarks]
) -> str:
    """Write the page of boxes, log all notes, and return the sentence that names the page and the notes."""
    from e2e_vl.run.annotation_page import write_annotation_page  # imports torch, which takes seconds

    notes = {}
    for remarks in all_remarks:
        notes |= remarks.notes
        for note, records in remarks.notes.items():
            logger.warning("%s: %s (%d): %s.", remarks.source, note, len(records), list_examples(records))
    write_annotation_page(path, instances, refs, image_folder.path, notes)
    if not notes:
        return f"Look at {path} before training."
    counts = "; ".join(f"{note} ({len(records)})" for note, records in notes.items())
    return f"Look at {path} before training: {counts}."


class _Text(NamedTuple):
    """A text about an annotation; the text is None where only the split of its image is stated."""

    annotation: dict[str, Any]
    text: str | None
    split: str


def convert(
    boxes: Sequence[Row],
    rows: Sequence[Row],
    image_folder: ImageFolder,
    val: float,
    remarks: Remarks | None = None,
    *,
    skip_missing: bool = False,
) -> tuple[dict, list[dict]]:
    """Make the contents of an instances file and of a refs file.

    Args:
        boxes: see `read_boxes`; their texts are expressions too.
        rows: expressions about them.
        val: share of the images in the split val, drawn at random; a split of a row goes first.
        remarks: collects what is said about `rows`.
        skip_missing: leave out expressions about images that are not there; by default they are an error.

    Raises:
        UserError: expressions that mean no box, which are all listed, or images with several splits.
    """
    remarks = remarks or Remarks(image_folder.path)
    labels = sorted({box.label for box in boxes})
    images = _make_images(sorted({box.image for box in boxes}), image_folder)
    annotations: dict[tuple, dict] = {}  # by image, category and box, which a CSV file may repeat
    boxes_of: dict[str, dict[str, list[dict]]] = {name: {} for name in images}  # by image and id in the export
    texts = []
    for box in boxes:
        x, y, width, height = box.box
        annotation = {
            "id": len(annotations) + 1,
            "image_id": images[box.image]["id"],
            "category_id": labels.index(box.label) + 1,
            "bbox": [x, y, width, height],
            "area": width * height,
            "iscrowd": int(box.is_crowd),
            "id_in_export": box.id,
        }
        annotation = annotations.setdefault((box.image, box.label, *box.box), annotation)
        with_same_id = boxes_of[box.image].setdefault(str(box.id), [])
        if annotation not in with_same_id:
            with_same_id.append(annotation)
        texts.append(_Text(annotation, box.text, box.split))
    for row in rows:
        annotation = _find_annotation(row, boxes_of, image_folder, remarks, skip_missing=skip_missing)
        if annotation is not None:
            texts.append(_Text(annotation, row.text, row.split))
    remarks.raise_errors()
    if not any(text.text for text in texts):  # the only box of a category in an image is called by it
        counts = Counter((row["image_id"], row["category_id"]) for row in annotations.values())
        for annotation in annotations.values():
            if counts[annotation["image_id"], annotation["category_id"]] == 1:
                texts.append(_Text(annotation, labels[annotation["category_id"] - 1], ""))
    splits = _choose_splits(texts, val)
    categories = [{"id": number, "name": name} for number, name in enumerate(labels, start=1)]
    content = {"images": [*images.values()], "annotations": [*annotations.values()], "categories": categories}
    return content, _make_refs(texts, splits)


def _make_images(names: Sequence[str], image_folder: ImageFolder) -> dict[str, dict[str, Any]]:
    """Make the record of each image; its id is the name without suffix, unless images differ by the suffix only."""
    stems = Counter(name.rpartition(".")[0] for name in names)
    images = {}
    for name in names:
        stem = name.rpartition(".")[0]
        width, height = image_folder.size(name)
        image_id = stem if stems[stem] == 1 else name
        images[name] = {"id": image_id, "file_name": name, "width": width, "height": height}
    return images


def _find_annotation(
    row: Row,
    boxes_of: Mapping[str, Mapping[str, list]],
    image_folder: ImageFolder,
    remarks: Remarks,
    *,
    skip_missing: bool,
) -> dict | None:
    """Return the annotation that an expression means; None if it means none, which goes to `remarks`."""
    if row.text is None or row.box is None:
        remarks.refuse("rows without an expression and a box", row.where)
        return None
    candidates = image_folder.candidates(row.image)
    if not candidates and skip_missing:
        remarks.note("expressions about missing images are left out", row.where)
        return None
    if len(candidates) != 1:
        remedy = "correct the names"
        if not candidates:
            remedy += ", or leave them out with --skip-missing"
        how_many = len(candidates) or "no"
        remarks.refuse("images that are not there or not unique", f"{row.where} ({how_many} {row.image})", remedy)
        return None
    boxes = boxes_of.get(candidates[0], {})
    if isinstance(row.box, tuple):
        all_annotations = list(itertools.chain.from_iterable(boxes.values()))
        annotations = _find_overlapping(row.box, all_annotations)
    else:
        annotations = boxes.get(str(row.box), [])
    if len(annotations) == 1:
        return annotations[0]
    if annotations:
        remarks.refuse("expressions about ids that several boxes have", f"{row.where} (box {row.box} of {row.image})")
    else:
        ids = ", ".join(boxes) or "none"
        details = f"{row.where} '{row.text}' ({row.image} has no box {row.box}, but {ids})"
        remarks.refuse("expressions about boxes that are not there", details)
    return None


def _find_overlapping(box: tuple[float, ...], annotations: Sequence[dict]) -> list[dict]:
    """Return the annotation that overlaps most with a box [x, y, width, height]; none below an IoU of `MIN_IOU`."""
    if not annotations:
        return []
    boxes = np.array([annotation["bbox"] for annotation in annotations])
    overlaps = mask.iou(np.array([box]), boxes, [0] * len(boxes))[0]
    if overlaps.max() < MIN_IOU:
        return []
    return [annotations[overlaps.argmax()]]


def _choose_splits(texts: Sequence[_Text], val: float) -> dict[str, str]:
    """Return the split of each image: as stated, else val for a share of the images with expressions, else train."""
    image_ids = sorted({text.annotation["image_id"] for text in texts if text.text})
    val_ids = random.Random(0).sample(image_ids, round(val * len(image_ids)))
    split_of = dict.fromkeys(image_ids, "train") | dict.fromkeys(val_ids, "val")

    stated_splits: dict[str, set[str]] = {}
    for text in texts:
        if text.split:
            stated_splits.setdefault(text.annotation["image_id"], set()).add(text.split)
    ambiguous = []
    for image_id, splits in stated_splits.items():
        if len(splits) > 1:
            ambiguous.append(f"{image_id} ({', '.join(sorted(splits))})")
        split_of[image_id] = min(splits)
    if ambiguous:
        examples = list_examples(ambiguous)
        raise UserError(f"Images have several splits ({len(ambiguous)}): {examples}; give each one split.")
    return split_of


def _make_refs(texts: Iterable[_Text], splits: Mapping[str, str]) -> list[dict]:
    refs: dict[int, dict] = {}
    expressions = [text for text in texts if text.text]
    for number, (annotation, text, _) in enumerate(expressions, start=1):
        ref = {
            "ref_id": annotation["id"],
            "ann_id": annotation["id"],
            "image_id": annotation["image_id"],
            "split": splits[annotation["image_id"]],
            "sentences": [],
        }
        ref = refs.setdefault(annotation["id"], ref)
        ref["sentences"].append({"sent_id": number, "sent": text})
    return list(refs.values())
