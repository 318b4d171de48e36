"""Convert the export of an annotation tool to the boxes and expressions that configs/own_data train on.

    e2e-vl convert-annotations EXPORT --expressions expressions.csv --output own_data

EXPORT is COCO JSON (CVAT, Label Studio), a folder of LabelMe's JSON files, a folder in YOLO's format (with data.yaml,
classes.txt or obj.names), or a CSV file with the columns image, label, x, y, width, height (or xmin, ymin, xmax, ymax).
The photos are in OUTPUT/images, or in --images.

Expressions are a CSV file with the columns image, box, text and, if wanted, split, or a list of such objects in a JSON
file. `box` is an annotation's id (COCO), its number in its file from 1 (others), or [x, y, width, height] (in CSV, four
columns). The column `text` of a CSV file of boxes, the descriptions of LabelMe's shapes and CVAT's attribute
`expression` are expressions too. Without any, the only box of a category in a photo is called by the category.

Writes OUTPUT/instances.json and OUTPUT/refs.json, and prints the command that trains on them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from detector.errors import UserError, user_path
from detector.io import write_json
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.data.annotation_tools import Box, Photos, Row, read_boxes, read_rows
from e2e_vl.io import FourNumbers
from e2e_vl.metrics.refcoco import box_iou


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


def convert(boxes: Sequence[Box], rows: Sequence[Row], photos: Photos, val: float) -> tuple[dict, list[dict]]:
    """The contents of an instances file and of a refs file.

    Args:
        rows: expressions.
        val: share of the photos in the split val, drawn at random; a split in `rows` goes first.
    """
    names = sorted({one.photo for one in boxes})
    images = [
        {"id": number, "file_name": name, **dict(zip(("width", "height"), photos.size(name), strict=True))}
        for number, name in enumerate(names, start=1)
    ]
    of_photo = {image["file_name"]: image for image in images}
    categories = {name: number for number, name in enumerate(sorted({one.category for one in boxes}), start=1)}
    annotations: dict[tuple, dict] = {}  # by photo, category and box, which a CSV file may repeat
    found: dict[str, dict[str, dict]] = {name: {} for name in names}  # by photo and id in the export
    texts = []
    for one in boxes:
        image, (x, y, width, height) = of_photo[one.photo], one.box
        x, y, right, bottom = max(x, 0), max(y, 0), min(x + width, image["width"]), min(y + height, image["height"])
        box = [round(value, 2) for value in (x, y, right - x, bottom - y)]
        ids = {"image_id": image["id"], "category_id": categories[one.category]}
        new = {"id": len(annotations) + 1, **ids, "bbox": box, "area": box[2] * box[3], "iscrowd": int(one.is_crowd)}
        target = found[one.photo][str(one.id)] = annotations.setdefault((one.photo, one.category, *box), new)
        texts += [(target, one.text)] if one.text else []
    chosen = random.Random(0).sample(names, round(val * len(names)))
    splits = {name: "val" if name in chosen else "train" for name in names}
    for row in rows:
        photo = photos.find(row.image)
        targets = found.get(photo, {})
        target = targets.get(str(row.box))
        if isinstance(row.box, tuple):
            overlaps = {_iou(one["bbox"], row.box): one for one in targets.values()}
            target = overlaps[max(overlaps)] if max(overlaps, default=0) >= 0.5 else None
        if target is None:
            raise UserError(f"The expression '{row.text}': {photo} has no box {row.box}, but {', '.join(targets)}.")
        splits[photo] = row.split or splits[photo]
        texts.append((target, row.text))
    if not texts:
        counts = Counter((one["image_id"], one["category_id"]) for one in annotations.values())
        texts = [(one, key[1]) for key, one in annotations.items() if counts[one["image_id"], one["category_id"]] == 1]
    refs = {}
    for number, (one, text) in enumerate(texts, start=1):
        ids = {"ref_id": one["id"], "ann_id": one["id"], "image_id": one["image_id"]}
        ref = refs.setdefault(one["id"], {**ids, "split": splits[names[one["image_id"] - 1]], "sentences": []})
        ref["sentences"].append({"sent_id": number, "sent": text.strip()})
    listed = [{"id": number, "name": name} for name, number in categories.items()]
    return {"images": images, "annotations": [*annotations.values()], "categories": listed}, [*refs.values()]


def _iou(first: FourNumbers, second: FourNumbers) -> float:
    (x, y, width, height), (left, top, *sides) = first, second
    return float(box_iou((x, y, x + width, y + height), (left, top, left + sides[0], top + sides[1]), "mattnet"))
