"""Convert the export of an annotation tool to the boxes and expressions that configs/own_data train on.

    e2e-vl convert-annotations EXPORT --expressions expressions.csv --output own_data

EXPORT is COCO JSON (CVAT, Label Studio), LabelMe's JSON files, YOLO's text files with data.yaml, classes.txt or
obj.names, or a CSV file with the columns image, label, x, y, width, height. The photos are in OUTPUT/images, or in
--images. Expressions have the columns image, box (the id in COCO JSON, else the number in its file) and text. See
docs/your_own_data.md. Writes OUTPUT/instances.json and OUTPUT/refs.json, and prints the command that trains on them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pycocotools import mask

from detector.errors import UserError, user_path
from detector.io import write_json
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.data.annotation_tools import Photos, Row, read_boxes, read_rows


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("export", type=Path, help="file or folder to read")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--images", type=Path, help="folder of the photos (default: images in --output)")
    parser.add_argument("--expressions", type=Path, help="CSV or JSON file of expressions")
    parser.add_argument("--val", type=float, default=0.2, help="share of photos in the split val (default: 0.2)")
    args = parser.parse_args(argv)
    photos = Photos(user_path(args.images or args.output / "images"))
    rows = [] if args.expressions is None else read_rows(user_path(args.expressions))
    instances, refs = convert([*read_boxes(user_path(args.export), photos)], rows, photos, args.val)
    for name, content in (("instances.json", instances), ("refs.json", refs)):
        write_json(args.output / name, content)
    splits = Counter({ref["image_id"]: ref["split"] for ref in refs}.values())
    classes, sentences = len(instances["categories"]), sum(len(ref["sentences"]) for ref in refs)
    images = "" if args.images is None else f" data.files.images={photos.folder.absolute()}"
    print(
        f"{len(instances['images'])} photos, {len(instances['annotations'])} boxes of {classes} categories, "
        f"{sentences} expressions about {len(refs)} boxes in {dict(splits)} photos",
        f"e2e-vl train --config configs/own_data/refcoco.yaml data.root={args.output}{images} "
        f"detector.overrides.MODEL.ROI_HEADS.NUM_CLASSES={classes} 'data.eval_splits=[{', '.join(sorted(splits))}]'",
        sep="\n",
    )
    return 0


def convert(boxes: Sequence[Row], rows: Sequence[Row], photos: Photos, val: float) -> tuple[dict, list[dict]]:
    """The contents of an instances file and of a refs file.

    Args:
        boxes: see `read_boxes`; their texts are expressions too.
        rows: expressions about them.
        val: share of the photos in the split val, drawn at random; a split of a row goes first.
    """
    images, labels = {}, sorted({one.label for one in boxes})
    for photo in sorted({one.image for one in boxes}):
        width, height = photos.size(photo)
        images[photo] = {"id": photo.rpartition(".")[0], "file_name": photo, "width": width, "height": height}
    annotations: dict[tuple, dict] = {}  # by photo, category and box, which a CSV file may repeat
    found: dict[str, dict[str, dict]] = {photo: {} for photo in images}  # by photo and id in the export
    texts = []
    for one in boxes:
        image, (x, y, width, height) = images[one.image], one.box
        x, y, right, bottom = max(x, 0), max(y, 0), min(x + width, image["width"]), min(y + height, image["height"])
        box = [round(value, 2) for value in (x, y, right - x, bottom - y)]
        ids = {"id": len(annotations) + 1, "image_id": image["id"], "category_id": labels.index(one.label) + 1}
        new = {**ids, "bbox": box, "area": box[2] * box[3], "iscrowd": int(one.is_crowd)}
        target = found[one.image][str(one.id)] = annotations.setdefault((one.image, one.label, *box), new)
        texts.append((target, one.text, one.split))
    for row in rows:
        targets = found.get(photo := photos.find(row.image), {})
        target = targets.get(str(row.box))
        if isinstance(row.box, tuple) and targets:
            own = np.array([one["bbox"] for one in targets.values()])
            overlaps = mask.iou(np.array([row.box]), own, [0] * len(own))[0]
            target = [*targets.values()][overlaps.argmax()] if overlaps.max() >= 0.5 else None
        if target is None:
            raise UserError(f"The expression '{row.text}': {photo} has no box {row.box}, but {', '.join(targets)}.")
        texts.append((target, row.text, row.split))
    if not any(text for _, text, _ in texts):  # the only box of a category in a photo is called by it
        counts = Counter((one["image_id"], one["category_id"]) for one in annotations.values())
        alone = [one for one in annotations.values() if counts[one["image_id"], one["category_id"]] == 1]
        texts += [(one, labels[one["category_id"] - 1], "") for one in alone]
    named = sorted({one["image_id"] for one, text, _ in texts if text})
    chosen = random.Random(0).sample(named, round(val * len(named)))
    splits = {name: "val" if name in chosen else "train" for name in named}
    splits |= {one["image_id"]: split for one, _, split in texts if split}
    refs: dict[int, dict] = {}
    for number, (one, text, _) in enumerate((row for row in texts if row[1]), start=1):
        ids = {"ref_id": one["id"], "ann_id": one["id"], "image_id": one["image_id"]}
        ref = refs.setdefault(one["id"], {**ids, "split": splits[one["image_id"]], "sentences": []})
        ref["sentences"].append({"sent_id": number, "sent": text.strip()})
    categories = [{"id": number, "name": name} for number, name in enumerate(labels, start=1)]
    content = {"images": [*images.values()], "annotations": [*annotations.values()], "categories": categories}
    return content, [*refs.values()]
