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
ROWS = [(name, number, *box) for name, boxes in BOXES.items() for number, box in enumerate(boxes)]


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


def voc(name: str, size: tuple[int, int] = (0, 0)) -> str:
    """As LabelImg writes it: the corners as drawn; a size of 0 is not known."""
    objects = "".join(
        f"<object><name>{label}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + w}</xmax>"
        f"<ymax>{y + h}</ymax></bndbox></object>"
        for label, x, y, w, h in BOXES[name]
    )
    sides = "<size><width>{}</width><height>{}</height><depth>3</depth></size>".format(*size)
    source = "<source><database>Unknown</database></source>"
    return f"<annotation><filename>{name}</filename>{source}{sides}{objects}</annotation>"


HEADERS = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
STUDIO = {"a.jpg": "images\\1/90fbb0c7-a.jpg", "b.jpg": "../../label-studio/media/upload/1/0b618f6a-b.jpg"}
EXPORTS: dict[str, dict[str, str | bytes]] = {  # files of the export
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
        + "".join(
            f"{name},{SIZES[name][0]},{SIZES[name][1]},{label},{x},{y},{x + w},{y + h}\n"
            for name, _, label, x, y, w, h in ROWS
        )
    },
    "CSV of a German Excel": {
        "boxes.CSV": (
            "sep=;\r\nImage;LABEL;xMin;yMin;xMax;yMax;\r\n"
            + "".join(f"{name};{label};{x},0;{y};{x + w},0;{y + h};\r\n" for name, _, label, x, y, w, h in ROWS)
            + ";;;;;;\r\n"
        ).encode("utf-16")
    },
    "CSV of makesense": {
        "labels.csv": "label_name,bbox_x,bbox_y,bbox_width,bbox_height,image_name,image_width,image_height\n"
        + "".join(
            f"{label},{x},{y},{w},{h},{name},{SIZES[name][0]},{SIZES[name][1]}\n" for name, _, label, x, y, w, h in ROWS
        )
    },
    "Pascal VOC": {"a.xml": voc("a.jpg"), "sub/b.XML": voc("b.jpg", SIZES["b.jpg"]), "sub/._b.xml": "\0"},
    "YOLO of LabelImg": {
        "one/classes.txt": "mug\npen\n",
        "one/a.txt": yolo("a.jpg"),
        "two/classes.txt": "pen\nmug\n",
        "two/b.txt": "\ufeff1" + yolo("b.jpg")[1:] + "\n",
        "README.txt": "https://example.org\n",
    },
    "YOLO with keypoints and scores": {
        "a.yml": "kpt_shape: [2, 3]\nnames: ['mug', 'pen']\n",
        "labels/a.txt": yolo("a.jpg").replace("\n", " .1 .2 2 .3 .4 0\n"),
        "labels/b.txt": yolo("b.jpg").replace("\n", " 0.87\n"),
    },
}


@pytest.fixture(params=EXPORTS)
def export(request, tmp_path: Path) -> Path:
    return write_export(tmp_path, request.param)


def write_export(folder: Path, kind: str) -> Path:
    for name, content in EXPORTS[kind].items():
        path = folder / "export" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path if path.suffix.lower() == ".csv" else folder / "export"


def converted(export: Path, photos: Path, *words: object) -> tuple[CocoInstances, dict[tuple[int, str], str]]:
    """The boxes, and (annotation, expression) -> split."""
    assert tool.main([*map(str, (export, "--output", photos.parent, *words))]) == 0
    instances = CocoInstances(photos.parent / "instances.json")
    expressions = read_expressions(photos.parent / "refs.json", instances)
    return instances, {(row.ann_ids[0], row.words): row.split for row in expressions}


def test_every_export_gives_the_same_boxes(export, photos):
    instances, expressions = converted(export, photos)
    assert instances.class_names == ["mug", "pen"]
    images = sorted(instances.images, key=lambda image: Path(image.file_name).name)
    assert [image.file_name for image in images] == ["set/a.jpg", "b.jpg"]
    assert [(image.id, image.width, image.height) for image in images] == [("set/a", 100, 80), ("b", 80, 100)]
    for image, expected in zip(images, BOXES.values(), strict=True):
        boxes = [(instances.class_names[annotated.class_index], *annotated.box) for annotated in image.objects]
        assert boxes == [(label, x, y, x + w, y + h) for label, x, y, w, h in expected]
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
    split_of = converted(export, photos, "--expressions", texts, "--val", "0.5")[1]
    split = split_of[2, "the thin pen"]
    assert split_of == {(3, "mug alone"): "test", (2, "the thin pen"): split, (2, "the pen, lying"): split}
    printed = capsys.readouterr().out
    assert "2 images, 3 boxes of 2 categories, 3 expressions about 2 boxes" in printed
    assert "e2e-vl train --config configs/own_data/refcoco.yaml" in printed and "NUM_CLASSES=2" in printed
    rows = [{"image": "a.jpg", "box": [10, 20, 30, 40], "text": "cup"}, {"image": "b", "box": 2, "text": "c"}]
    texts.with_suffix(".json").write_text(json.dumps(rows))
    assert {*converted(export, photos, "--expressions", texts.with_suffix(".json"))[1]} == {(1, "cup"), (3, "c")}


@pytest.mark.parametrize("expression", ["left one", 12])  # CVAT writes a text of digits as a number
def test_expressions_come_from_an_attribute_in_cvat_and_boxes_are_clipped(tmp_path, photos, expression):
    text = coco({name: name for name in SIZES}, 1, {"occluded": False, "expression": expression})
    (tmp_path / "a.json").write_text(text.replace("50.0, 5.0, 20.0", "90.0, 5.0, 20.0"))
    instances, expressions = converted(tmp_path / "a.json", photos)
    assert {*expressions} == {(number, str(expression)) for number in (1, 2, 3)}
    assert instances.images[1].objects[1].box == (90, 5, 100, 15)


BOX = "image,label,x,y,width,height,text\na.jpg,mug,10,20,30,40,the mug\n"
NAMES = {"classes.txt": "mug\npen\n"}
LABEL = {"label": "mug", "points": [[1, 2], [30, 40]], "shape_type": "rectangle"}


def coco_of(*annotations: dict, size: tuple[int, int] = (100, 80), name: str = "a.jpg") -> dict[str, str]:
    """COCO JSON of one photo."""
    base = {"image_id": 1, "category_id": 1, "bbox": [10, 20, 30, 40]}
    content = {
        "images": [{"id": 1, "file_name": name, "width": size[0], "height": size[1]}],
        "annotations": [base | {"id": number} | row for number, row in enumerate(annotations, start=5)],
        "categories": [{"id": 0, "name": "mug", "supercategory": "none"}, {"id": 1, "name": "mug"}],  # Roboflow's root
    }
    return {"x.json": json.dumps(content)}


def labelme_of(*shapes: dict, **fields: object) -> dict[str, str]:
    return {"a.json": json.dumps({"imagePath": "a.jpg", "shapes": [LABEL | shape for shape in shapes]} | fields)}


def convert_files(tmp_path: Path, photos: Path, files: dict, *words: str) -> tuple[int, list[list[float]]]:
    """Exit status, and the boxes."""
    for name, content in files.items():
        path = tmp_path / "export" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    export = path if len(files) == 1 and path.suffix in (".csv", ".xlsx") else tmp_path / "export"
    status = tool.main([str(export), "--output", str(photos.parent), *words])
    content = json.loads((photos.parent / "instances.json").read_text()) if status == 0 else {"annotations": []}
    return status, [row["bbox"] for row in content["annotations"]]


CAPTIONS = json.dumps({"images": [], "annotations": [{"image_id": 1, "caption": "a mug"}]})
CORNERS = "image,label,xmin,ymin,xmax,ymax\n" + "".join(f"a.jpg,mug,{x},2,105,78\n" for x in (10, 11, 12))

REFUSED = {  # what is wrong -> files of the export, parts of the message
    "no area": ({"b.csv": BOX + "a.jpg,mug,1,2,0,4,x\na.jpg,mug,1,2,3,-4,x\n"}, ["(2): line 3 (", "; line 4 ("]),
    "outside": ({"b.csv": BOX + "a.jpg,mug,120,2,30,40,x\n"}, ["outside", "line 3", "100 x 80"]),
    "no number": ({"b.csv": BOX + "a.jpg,mug,far,2,30,40,x\na.jpg,mug,,2,30,4,\n"}, ["line 3", "line 4 (x is missing"]),
    "not finite": ({"b.csv": BOX + "a.jpg,mug,inf,2,30,40,x\n"}, ["line 3"]),
    "no label": ({"b.csv": BOX + "a.jpg,,1,2,30,40,x\n,mug,1,2,3,4,x\n"}, ["line 3; line 4. Correct"]),
    "comma": ({"b.csv": BOX + "a.jpg,mug,1,2,30,40,the mug, not the pen\n"}, ["line 3", "quotes"]),
    "quote": ({"b.csv": BOX + 'a.jpg,mug,1,2,3,4,"x\na.jpg,mug,1,2,3,4,"x"\n'}, ["line 3", "quote"]),
    "quote to the end": ({"b.csv": BOX + 'a.jpg,mug,1,2,3,4,"x\na.jpg,mug,1,2,3,4,x\n'}, ["line 3", "quote"]),
    "quote over rows": ({"b.csv": BOX + 'a.jpg,mug,1,2,3,4,"x\na.jpg,mug,1,2,3,4,x"\n'}, ["line 3", "quote"]),
    "no header": ({"b.csv": "a.jpg,mug,1,2,30,40\n"}, ["first line", "a.jpg, mug"]),
    "header twice": ({"b.csv": "image,label,x,x,y,width,height\n"}, ["x twice"]),
    "rotated": (
        {"b.csv": "image,label,x,y,w,h,angle\na.jpg,mug,1,2,3,4,0.0\na.jpg,mug,1,2,3,4,30\n"},
        ["(1): line 3. Give"],
    ),
    "rotation": (
        coco_of({"attributes": {"rotation": "left"}}, {"rotation": 0.5}),
        ["annotation 5; x.json, annotation 6. Export"],
    ),
    "suffix of another photo": ({"b.csv": BOX + "a.png,mug,1,2,3,4,x\n"}, ["not in", "(1): a.png"]),
    "no columns of a box": ({"b.csv": "image,label,xc,yc,w,h\na.jpg,mug,1,2,3,4\n"}, ["first line", "xc, yc"]),
    "VIA": ({"b.csv": "filename,region_shape_attributes\n"}, ["COCO"]),
    "empty": ({"b.csv": "image,label,x,y,width,height\n"}, ["no boxes"]),
    "normalised": ({"b.csv": BOX.splitlines()[0] + "\na.jpg,mug,.1,.2,.3,.4,x\n"}, ["normalised"]),
    "corners": (coco_of({"bbox": [60, 50, 90, 75]}, {"bbox": [10, 20, 95, 70]}, {"bbox": [5, 5, 99, 79]}), ["xmin"]),
    "splits": (
        {"b.csv": "image,label,x,y,w,h,split\na.jpg,mug,1,2,3,4,val\na.jpg,mug,1,2,3,5,train\n"},
        ["train, val"],
    ),
    "workbook": ({"b.xlsx": "x"}, ["CSV"]),
    "class -1": (
        NAMES | {"a.txt": "0 .5 .5 .2 .2\n-1 .5 .5 .2 .2\n2 .5 .5 .2 .2\n"},
        ["a.txt, line 2 (class -1)", "line 3"],
    ),
    "class name": (NAMES | {"a.txt": "mug .5 .5 .2 .2\n"}, ["a.txt, line 1", "numbers"]),
    "no numbers at all": (NAMES | {"set/a.txt": "mug 1;2;3;4\n", "c.md": ""}, ["set/a.txt, line 1"]),
    "pixels": (NAMES | {"a.txt": "0 50 40 20 20\n"}, ["shares", "line 1"]),
    "no width": (NAMES | {"a.txt": "0 .5 .5 0 .2\n0 .5 .5 .2 -.2\n"}, ["line 1", "line 2"]),
    "short line": (NAMES | {"a.txt": "0 .5 .5 .2 .2\n0 .5 .5 .2\n0 .1 .2 .3 .4 .5 .6 .7\n"}, ["line 2", "line 3"]),
    "DOTA without names": ({"P1.txt": "imagesource:x\n1 1 9 1 9 9 1 9 plane 0\n"}, ["DOTA", "OBB"]),
    "no class names": ({"a.txt": "0 .5 .5 .2 .2\n"}, ["YOLO", "classes.txt"]),
    "DOTA": (NAMES | {"a.txt": "1 1 9 1 9 9 1 9 plane 0\n"}, ["OBB"]),
    "two lists": (NAMES | {"data.yaml": "names: [pen, mug]", "a.txt": "0 .5 .5 .2 .2\n"}, ["data.yaml", "classes.txt"]),
    "yes": ({"data.yaml": "names: {0: no, 1: yes}", "a.txt": "0 .5 .5 .2 .2\n"}, ["quotes"]),
    "names": ({"data.yaml": "names: mug", "a.txt": "0 .5 .5 .2 .2\n"}, ["data.yaml"]),
    "no points": (labelme_of({"points": []}, {"points": None}), ["a.json, shape 1", "shape 2"]),
    "one point": (labelme_of({"points": [[1, 2]]}), ["a.json, shape 1"]),
    "ellipse": (labelme_of({"shape_type": "ellipse"}), ["shape 1 (ellipse)"]),
    "another size": (labelme_of({}, imageWidth=50, imageHeight=40), ["a.jpg", "50 x 40", "100 x 80"]),
    "no bbox": (
        coco_of({"bbox": None, "segmentation": {"counts": "x"}}, {"bbox": [1, 2]}),
        ["annotation 5", "annotation 6"],
    ),
    "no category": (coco_of({"category_id": 9}, {"image_id": 8}), ["annotation 5", "category_id 9", "image_id 8"]),
    "name in two photos": (NAMES | {"c.txt": "0 .5 .5 .2 .2\n"}, ["c.jpg", "c.png"]),
    "no bndbox": ({"a.xml": "<annotation><object><name>mug</name></object></annotation>"}, ["a.xml, object 1"]),
    "no XML": ({"a.xml": "<annotation>"}, ["a.xml"]),
    "CVAT": ({"a.xml": "<annotations><image/></annotations>"}, ["CVAT", "COCO 1.0"]),
    "Label Studio": ({"p.json": '[{"data": {}, "annotations": []}]'}, ["Label Studio", "COCO"]),
    "VIA's project": ({"p.json": '{"a.jpg1": {"filename": "a.jpg", "regions": []}}'}, ["VIA", "COCO"]),
    "Supervisely": ({"meta.json": '{"classes": [], "tags": []}'}, ["Supervisely", "COCO"]),
    "TFRecord": ({"x.tfrecord": "x", "label_map.pbtxt": ""}, ["TFRecord", "COCO"]),
    "captions": ({"c.json": CAPTIONS}, ["COCO captions", "instances"]),
    "image labels": ({"c.json": CAPTIONS.replace("caption", "category_id")}, ["whole images", "instances"]),
    "two files of a photo": ({"a.xml": voc("a.jpg"), "b.xml": voc("a.jpg")}, ["a.jpg (a, b)"]),
    "format of photos": ({"b.csv": BOX + "d.HEIC,mug,1,2,3,4,x\n"}, ["d.heic", "JPEG"]),
    "nothing": ({"notes.md": "x"}, ["no JSON of COCO or LabelMe", "classes.txt"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_meaning_is_refused_with_its_places(tmp_path, photos, capsys, kind):
    for name in ("c.jpg", "c.png"):
        Image.new("RGB", (100, 80)).save(photos / name)
    (photos / "d.heic").touch()
    files, parts = REFUSED[kind]
    assert convert_files(tmp_path, photos, files)[0] == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
    assert not (photos.parent / "instances.json").exists()


READ = {  # what is odd -> files of the export, the boxes of a.jpg, part of what is said about it
    "rotated": (coco_of({"bbox": [40, 10, 20, 60], "attributes": {"rotation": 90.0}}), [[20, 30, 60, 20]], "rotated"),
    "tiny": (coco_of({"bbox": [0, 0, 1, 1]}), [[0, 0, 1, 1]], "2 x 2 pixels (1)"),
    "rotated, as text": (coco_of({"attributes": {"rotation": "-90"}}), [[5, 25, 40, 30]], "rotated"),
    "not rotated": (coco_of({"attributes": None}, {"attributes": [], "id": 5.0}), [[10, 20, 30, 40]], ""),
    "polygon": (coco_of({"bbox": [], "segmentation": [[1, 2, 30, 2, 30, 40]]}), [[1, 2, 29, 38]], ""),
    "maybe corners": (coco_of({"bbox": [60, 50, 90, 75]}), [[60, 50, 40, 30]], "look like corners"),
    "outside at the left": (coco_of({"bbox": [-5, -5, 30, 40]}), [[0, 0, 25, 35]], "training: boxes were clipped"),
    "corners outside": ({"b.csv": CORNERS}, [[x, 2, 100 - x, 76] for x in (10, 11, 12)], "clipped to their images (3)"),
    "number as a label": (labelme_of({"label": 3}), [[1, 2, 29, 38]], ""),
    "repeated": (coco_of({}, {}), [[10, 20, 30, 40]], "repeat an earlier one are left out (1)"),
    "group": (coco_of({"iscrowd": 1}), [[10, 20, 30, 40]], "groups (iscrowd)"),
    "no expression": (coco_of({"attributes": {"expression": True}}), [[10, 20, 30, 40]], "no text are not read (1)"),
    "captions beside": (
        coco_of({}) | {"c.json": CAPTIONS},
        [[10, 20, 30, 40]],
        "beside those of COCO are not read (1)",
    ),
    "another photo": ({"b.json": labelme_of({})["a.json"]}, [[1, 2, 29, 38]], "name another image"),
    "converted photo": (coco_of({}, name="a.HEIC"), [[10, 20, 30, 40]], "another suffix than in the export (1)"),
    "two folders": (
        {f"{part}/a.json": labelme_of({})["a.json"] for part in "xy"},
        [[1, 2, 29, 38]],
        "several annotation",
    ),
    "clipped": (coco_of({"bbox": [90, 70, 20, 20]}), [[90, 70, 10, 10]], "clipped to their images (1)"),
    "no size": (labelme_of({}, imageWidth=None), [[1, 2, 29, 38]], ""),
    "circle": (labelme_of({"shape_type": "circle", "points": [[50, 40], [50, 50]]}), [[40, 30, 20, 20]], ""),
    "point": (labelme_of({}, {"shape_type": "point", "points": [[1, 2]]}), [[1, 2, 29, 38]], "points and lines"),
    "renamed": (labelme_of({}, imagePath="old.jpg"), [[1, 2, 29, 38]], "renamed"),
    "YOLO beside": (labelme_of({}) | NAMES, [[1, 2, 29, 38]], "labels of YOLO"),
    "two formats": (labelme_of({}) | {"a.xml": voc("a.jpg")}, [[1, 2, 29, 38]], "Pascal VOC"),
    "blank text": ({"b.csv": BOX.replace("the mug", "  ")}, [[10, 20, 30, 40]], ""),
    "tabs": ({"b.csv": BOX.replace(",", "\t")}, [[10, 20, 30, 40]], ""),
    "UTF-16": ({"b.csv": BOX.replace("the mug", "caf\xe9").encode("utf-16")}, [[10, 20, 30, 40]], ""),
    "left and top": ({"b.csv": "path,class,left,top,w,h\nA.JPG,mug,1,2,3,4\n"}, [[1, 2, 3, 4]], ""),
    "OBB": (NAMES | {"a.txt": "0 .5 .1 .9 .5 .5 .9 .1 .5 .97\n"}, [[10, 8, 80, 64]], ""),
    "of the VOC data set": (
        {"a.xml": voc("a.jpg").replace("Unknown", "The VOC2007 Database")},
        [[9, 19, 31, 41], [49, 4, 21, 11]],
        "",
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_what_has_one_meaning_is_read_and_said(tmp_path, photos, capsys, kind):
    files, boxes, part = READ[kind]
    assert convert_files(tmp_path, photos, files) == (0, boxes)
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert part in last_line and str(photos.parent / "boxes.html") in last_line


# the raster of b.jpg has 100 x 80 pixels; (10, 20, 30, 40) there is (20, 10, 40, 30) upright
@pytest.mark.parametrize(
    ("size", "box", "upright", "part"),
    [
        ((80, 100), [10, 20, 30, 40], [10, 20, 30, 40], "."),
        ((100, 80), [10, 20, 30, 40], [20, 10, 40, 30], "turned upright (EXIF) (1)"),
        ((100, 80), [60, 20, 30, 40], [20, 60, 40, 30], "turned upright (EXIF) (1)"),
        ((100, 80), [10, 50, 30, 45], [10, 50, 30, 45], "swapped sides in the export (1)"),  # it only fits upright
    ],
)
def test_a_photo_with_exif_is_taken_as_it_was_annotated(tmp_path, photos, capsys, size, box, upright, part):
    files = coco_of({"bbox": box}, size=size, name="b.jpg")
    assert convert_files(tmp_path, photos, files) == (0, [upright])
    assert part in capsys.readouterr().out.splitlines()[-1]


def test_photos_that_tell_how_they_were_drawn_decide_for_those_that_do_not(tmp_path, photos, capsys):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (100, 80)).save(photos / "c.jpg", exif=exif)
    rows = "".join(
        f"{name},mug,{box}\n" for name, box in (("b.jpg", "10,20,30,40,100,80"), ("c.jpg", "10,50,30,45,100,80"))
    )
    files = {"b.csv": "image,label,x,y,w,h,image_width,image_height\n" + rows}
    assert convert_files(tmp_path, photos, files) == (0, [[10, 20, 30, 40], [10, 50, 30, 45]])
    assert "swapped sides in the export (2)" in capsys.readouterr().out


def test_missing_photos_are_all_named_or_left_out(tmp_path, photos, capsys):
    rows = BOX + "".join(f"{number}.jpg,mug,1,2,3,4,x\n" for number in range(14))
    assert convert_files(tmp_path, photos, {"b.csv": rows})[0] == 2
    message = capsys.readouterr().err
    assert "(14): 0.jpg; 1.jpg" in message and "11.jpg and 2 more" in message and "--skip-missing" in message
    assert convert_files(tmp_path, photos, {"b.csv": rows}, "--skip-missing") == (0, [[10, 20, 30, 40]])
    assert "missing images are left out (14)" in capsys.readouterr().out
    assert convert_files(tmp_path, photos, {"b.csv": rows.replace("a.jpg", "z.jpg")}, "--skip-missing")[0] == 2


def test_folders_give_splits_if_there_are_train_and_val(tmp_path, photos):
    """As Roboflow writes them, where photos of equal names may lie in different folders."""
    files = {}
    for folder in ("train", "valid", "test"):
        (photos / folder).mkdir()
        Image.new("RGB", (100, 80)).save(photos / folder / "p.jpg")
        files[f"{folder}/a.xml"] = voc("a.jpg").replace("a.jpg", "p.jpg")
    assert convert_files(tmp_path, photos, files)[0] == 0
    refs = json.loads((photos.parent / "refs.json").read_text())
    assert {ref["image_id"]: ref["split"] for ref in refs} == {"train/p": "train", "valid/p": "val", "test/p": "test"}
    (tmp_path / "export" / "valid" / "a.xml").unlink()
    assert convert_files(tmp_path, photos, {"train/a.xml": files["train/a.xml"]}, "--val", "0")[0] == 0
    refs = json.loads((photos.parent / "refs.json").read_text())
    assert {ref["split"] for ref in refs} == {"train"}


def test_photos_that_differ_by_the_suffix_have_different_ids(tmp_path, photos, capsys):
    Image.new("RGB", (100, 80)).save(photos / "b.png")
    rows = BOX + "b.jpg,mug,1,2,3,4,\nb.png,mug,1,2,3,4,\n"
    assert convert_files(tmp_path, photos, {"b.csv": rows})[0] == 0
    assert [image.id for image in CocoInstances(photos.parent / "instances.json").images] == ["b.jpg", "b.png", "set/a"]
    (tmp_path / "export" / "b.csv").unlink()
    capsys.readouterr()
    assert convert_files(tmp_path, photos, {"b.json": labelme_of({}, imagePath="b.png")["a.json"]})[0] == 0
    assert capsys.readouterr().out.endswith("boxes.html before training.\n"), "b.png is no other photo than b.json says"


def test_an_earlier_conversion_is_no_part_of_the_export(photos):
    export = photos.parent
    (export / "classes.txt").write_text("mug\n")
    for text, box in (("0 .5 .5 .2 .2", [40, 32, 20, 16]), ("0 .5 .5 .4 .4", [30, 24, 40, 32])):
        (export / "a.txt").write_text(text)
        assert tool.main([str(export), "--output", str(export)]) == 0
        assert json.loads((export / "instances.json").read_text())["annotations"][0]["bbox"] == box


def test_the_page_shows_the_boxes_and_what_was_changed(tmp_path, photos):
    (photos / "set" / "a.jpg").write_bytes((photos / "set" / "a.jpg").read_bytes()[:-100])  # its header can be read
    rows = BOX + "b.jpg,mug,70,2,30,4,<b>\n"
    assert convert_files(tmp_path, photos, {"b.csv": rows})[0] == 0
    page = (photos.parent / "boxes.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64") == 1 and "No picture" in page
    assert "boxes were clipped to their images (1)" in page and "“&lt;b&gt;”" in page


WRONG_EXPRESSIONS = [
    ("image,box,text\na.jpg,7,the cup\na.jpg,8.0,pen\n", ["line 2", "the cup", "7", "0, 1", "line 3", "box 8"]),
    ("image,box,text\n", ["no expressions"]),
    ("image,box,text\nb.jpg,2,the cup\n", ["line 2", "several boxes"]),
    ("image,x,text\na.jpg,far,the cup\n", ["t.csv", "line 2", "far"]),
    ("image,box,text\nz.jpg,0,the cup\na.jpg,0, \n", ["line 2", "z.jpg", "line 3"]),
]


@pytest.mark.parametrize(("text", "parts"), WRONG_EXPRESSIONS)
def test_expressions_that_mean_no_box_are_refused(tmp_path, photos, capsys, text, parts):
    export, texts = write_export(tmp_path, "Label Studio"), tmp_path / "t.csv"
    path = export / "result.json"
    content = json.loads(path.read_text())
    content["annotations"].append(content["annotations"][-1] | {"bbox": [1, 2, 3, 4]})  # with the same id
    path.write_text(json.dumps(content))
    texts.write_text(text)
    assert tool.main([str(export), "--output", str(photos.parent), "--expressions", str(texts)]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message


def test_boxes_that_nothing_names_need_expressions(tmp_path, photos, capsys):
    files = {"b.csv": "image,label,x,y,w,h\na.jpg,mug,1,2,3,4\na.jpg,mug,10,20,30,40\n"}
    assert convert_files(tmp_path, photos, files) == (0, [[1, 2, 3, 4], [10, 20, 30, 40]])
    printed = capsys.readouterr().out
    assert "--expressions" in printed and "e2e-vl train" not in printed


def test_a_share_of_val_is_a_share(tmp_path, photos, capsys):
    assert "--val" in refused(["convert-annotations", tmp_path, "--output", photos.parent, "--val", "20"], capsys)
    assert "no such folder" in refused(["convert-annotations", tmp_path, "--output", tmp_path], capsys)
