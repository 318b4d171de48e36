"""The same two photos as each annotation tool exports them, and expressions about their boxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from e2e_vl.cli import convert_annotations as tool
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.refcoco import read_expressions
from tests.cli.calls import refused

# photo -> its boxes: category, x, y, width, height; EXIF turns the second one upright, to 80 x 100
BOXES = {"a.jpg": [("mug", 10, 20, 30, 40), ("pen", 50, 5, 20, 10)], "b.jpg": [("mug", 8, 10, 40, 50)]}
SIZES = {"a.jpg": (100, 80), "b.jpg": (80, 100)}
ROWS = [(name, number, *box) for name, own in BOXES.items() for number, box in enumerate(own)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The folder of the photos, below the folder that is converted to."""
    (tmp_path / "own" / "images" / "set").mkdir(parents=True)
    Image.new("RGB", (100, 80)).save(tmp_path / "own" / "images" / "set" / "a.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (100, 80)).save(tmp_path / "own" / "images" / "b.jpg", exif=exif)
    return tmp_path / "own" / "images"


def coco(names: dict[str, str], first: int, attributes: dict | None = None) -> str:
    """COCO JSON with file names of a tool, and ids that begin at `first`."""
    ids = {name: number for number, name in enumerate(names, start=first)}
    images = [
        {"id": ids[name], "file_name": names[name], "width": SIZES[name][0], "height": SIZES[name][1]} for name in names
    ]
    more = {"segmentation": [], "iscrowd": 0, "ignore": 0} | ({"attributes": attributes} if attributes else {})
    annotations = [
        {"id": row, "image_id": ids[name], "category_id": first + (label == "pen"), "bbox": [*map(float, box)], **more}
        for row, (name, _, label, *box) in enumerate(ROWS, start=first)
    ]
    categories = [{"id": first + row, "name": name, "supercategory": ""} for row, name in enumerate(("mug", "pen"))]
    return json.dumps({"images": images, "annotations": annotations, "categories": categories, "info": {"year": ""}})


def labelme(name: str) -> str:
    kinds, shapes = (("rectangle", None), ("polygon", "the long pen")), []
    for (label, x, y, width, height), (kind, text) in zip(BOXES[name], kinds, strict=False):
        points = [[x + width, y + height], [x, y]]  # in the order of drawing
        points += [[x + width, y]] if kind == "polygon" else []
        shapes.append({"label": label, "points": points, "shape_type": kind, "description": text, "group_id": None})
    shapes.append({"label": "tip", "points": [[3, 4]], "shape_type": "point", "flags": {}})
    sides = dict(zip(("imageWidth", "imageHeight"), SIZES[name], strict=True))
    return json.dumps(
        {"version": "5.5.0", "shapes": shapes, "imagePath": f"..\\photos\\{name}", "imageData": None} | sides
    )


def yolo(name: str, *, polygons: bool = False) -> str:
    lines, (width, height) = [], SIZES[name]
    for label, x, y, w, h in BOXES[name]:
        corners = (x, y, x + w, y, x + w, y + h, x, y + h) if polygons else (x + w / 2, y + h / 2, w, h)
        shares = [value / (width, height)[row % 2] for row, value in enumerate(corners)]
        lines.append(" ".join(map(str, (1 if label == "pen" else 0, *shares))))
    return "\n".join(lines) + "\n"


HEADERS = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
STUDIO = {"a.jpg": "images\\1/90fbb0c7-a.jpg", "b.jpg": "../../label-studio/media/upload/1/0b618f6a-b.jpg"}
EXPORTS: dict[str, dict[str, str]] = {  # files of the export
    "CVAT": {"annotations/instances_default.json": coco({"a.jpg": "set/a.jpg", "b.jpg": "b.jpg"}, 1)},
    "Label Studio": {"result.json": coco(STUDIO, 0)},
    "LabelMe": {"a.json": labelme("a.jpg"), "b.json": labelme("b.jpg")},
    "YOLO": {
        "data.yaml": "train: train.txt\nnames:\n  0: mug\n  1: pen\n",
        "train.txt": "images/train/a.jpg\nimages/train/b.jpg\n",
        "labels/train/a.txt": yolo("a.jpg", polygons=True),
        "labels/train/b.txt": yolo("b.jpg"),
    },
    "YOLO of Label Studio": {
        "classes.txt": "mug\npen\n",
        "notes.json": '{"categories": [], "info": {}}',
        "labels/90fbb0c7-a.txt": yolo("a.jpg"),
        "labels/0b618f6a-b.txt": yolo("b.jpg"),
    },
    "CSV": {
        "split.csv": "image,label,x,y,width,height,text,split\n"
        + "".join(f"{name},{label},{x},{y},{w},{h},{label},test\n" for name, _, label, x, y, w, h in (*ROWS, ROWS[0]))
    },
    "CSV of corners": {
        "boxes.csv": HEADERS
        + "".join(f"{name},100,80,{label},{x},{y},{x + w},{y + h}\n" for name, _, label, x, y, w, h in ROWS)
    },
}


@pytest.fixture(params=EXPORTS)
def export(request, tmp_path: Path) -> Path:
    return write_export(tmp_path, request.param)


def write_export(folder: Path, kind: str) -> Path:
    for name, content in EXPORTS[kind].items():
        path = folder / "export" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return path if path.suffix == ".csv" else folder / "export"


def converted(export: Path, photos: Path, *words: object) -> tuple[CocoInstances, dict[tuple[int, str], str]]:
    """The boxes, and (annotation, expression) -> split."""
    assert tool.main([*map(str, (export, "--output", photos.parent, *words))]) == 0
    instances = CocoInstances(photos.parent / "instances.json")
    expressions = read_expressions(photos.parent / "refs.json", instances)
    return instances, {(one.ann_ids[0], one.words): one.split for one in expressions}


def test_every_export_gives_the_same_boxes(export, photos):
    instances, expressions = converted(export, photos)
    assert instances.class_names == ["mug", "pen"]
    images = sorted(instances.images, key=lambda image: Path(image.file_name).name)
    assert [image.file_name for image in images] == ["set/a.jpg", "b.jpg"]
    assert [(image.id, image.width, image.height) for image in images] == [("set/a", 100, 80), ("b", 80, 100)]
    for image, own in zip(images, BOXES.values(), strict=True):
        found = [(instances.class_names[one.class_index], *one.box) for one in image.objects]
        assert found == [(label, x, y, x + w, y + h) for label, x, y, w, h in own]
    assert len(expressions) == (1 if "b.json" in {path.name for path in export.glob("*")} else 3)
    assert {*expressions.values()} == {"test" if export.stem == "split" else "train"}


TEXTS = """image,box,x,y,width,height,text,split
b.jpg,2,,,,,mug alone,test
a.jpg,,51,6,19,9,the thin pen,
a.jpg,,51,6,19,9,"the pen, lying",
"""


def test_expressions_name_a_box_by_its_id_or_its_place(tmp_path, photos, capsys):
    export, texts = write_export(tmp_path, "Label Studio"), tmp_path / "texts.csv"
    texts.write_text(TEXTS, encoding="utf-8-sig")  # as Excel writes it
    found = converted(export, photos, "--expressions", texts, "--val", "0.5")[1]
    split = found[2, "the thin pen"]
    assert found == {(3, "mug alone"): "test", (2, "the thin pen"): split, (2, "the pen, lying"): split}
    printed = capsys.readouterr().out
    assert "2 photos, 3 boxes of 2 categories, 3 expressions about 2 boxes" in printed
    assert "e2e-vl train --config configs/own_data/refcoco.yaml" in printed and "NUM_CLASSES=2" in printed
    rows = [{"image": "a.jpg", "box": [10, 20, 30, 40], "text": "cup"}, {"image": "b", "box": 2, "text": "c"}]
    texts.with_suffix(".json").write_text(json.dumps(rows))
    assert {*converted(export, photos, "--expressions", texts.with_suffix(".json"))[1]} == {(1, "cup"), (3, "c")}


def test_expressions_come_from_an_attribute_in_cvat_and_boxes_are_clipped(tmp_path, photos):
    text = coco({name: name for name in SIZES}, 1, {"occluded": False, "expression": "left one"})
    (tmp_path / "a.json").write_text(text.replace("50.0, 5.0, 20.0", "90.0, 5.0, 20.0"))
    instances, expressions = converted(tmp_path / "a.json", photos)
    assert {*expressions} == {(number, "left one") for number in (1, 2, 3)}
    assert instances.images[1].objects[1].box == (90, 5, 100, 15)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda e, p: (p / "b.jpg").unlink(), ["no photos have the name", "b.jpg"]),
        (lambda e, p: (p / "other").mkdir() or (p / "other" / "a.jpg").touch(), ["2 photos have the name", "a.jpg"]),
        (lambda e, p: Image.new("RGB", (100, 80)).save(p / "b.jpg"), ["b.jpg", "(80, 100)", "(100, 80)"]),
        (lambda e, p: e.write_text(e.read_text().replace('"image_id": 1', '"image_id": 7')), ["annotation 2"]),
        (lambda e, p: e.write_text('[{"id": 1, "annotations": []}]'), ["no JSON of COCO or LabelMe", "classes.txt"]),
        (lambda e, p: p.with_name("t.csv").write_text("image,box,text\na.jpg,7,the cup\n"), ["the cup", "7", "0, 1"]),
        (lambda e, p: p.with_name("t.csv").write_text("image,x,text\na.jpg,far,the cup\n"), ["t.csv", "far"]),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, photos, capsys, change, parts):
    export, texts = write_export(tmp_path, "Label Studio") / "result.json", photos.with_name("t.csv")
    change(export, photos)
    more = ["--expressions", texts] if texts.exists() else []
    message = refused(["convert-annotations", export, "--output", photos.parent, *more], capsys)
    assert all(part in message for part in parts), message
    assert not (photos.parent / "instances.json").exists()
