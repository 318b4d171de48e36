"""Recognise the format of an export and read its boxes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from detector.errors import MissingFileError, UserError, reading
from detector.io import read_json
from e2e_vl.data.annotation_tools import other_tools
from e2e_vl.data.annotation_tools.coco import read_coco
from e2e_vl.data.annotation_tools.files import list_files, relative_name
from e2e_vl.data.annotation_tools.images import ImageFolder
from e2e_vl.data.annotation_tools.labelme import read_labelme
from e2e_vl.data.annotation_tools.placement import place_boxes
from e2e_vl.data.annotation_tools.records import Annotation, Remarks, Row
from e2e_vl.data.annotation_tools.tables import TABLES, read_table
from e2e_vl.data.annotation_tools.voc import read_voc
from e2e_vl.data.annotation_tools.yolo import CLASS_FILES, YAML, ClassList, describe_labels, find_class_lists, read_yolo


def read_boxes(
    source: Path,
    image_folder: ImageFolder,
    remarks: Remarks | None = None,
    *,
    skip_missing: bool = False,
    ignored: Collection[Path] = (),
) -> list[Row]:
    """Read the boxes of a table, or of a file or folder of COCO, LabelMe, Pascal VOC or YOLO, in the files' order.

    Args:
        remarks: collects what is said about records that were changed or left out.
        skip_missing: leave out the annotations of images that are not there; by default they are an error.
        ignored: files of the folder that are not part of the export.

    Raises:
        UserError: the format is not known, or some records have no meaning, which are all listed.
    """
    remarks = remarks or Remarks(source)
    ignored = {path.resolve() for path in ignored}
    annotations = list(_read(source, image_folder, remarks, ignored))
    rows = place_boxes(annotations, image_folder, remarks, skip_missing=skip_missing)
    remarks.raise_errors()
    if not rows:
        raise UserError(f"{source} has no boxes; choose an export with annotations.")
    return rows


def _read(source: Path, image_folder: ImageFolder, remarks: Remarks, ignored: Collection[Path]) -> Iterator[Annotation]:
    if source.is_dir():
        return _read_folder(source, image_folder, remarks, ignored)
    if not source.is_file():
        raise MissingFileError(f"{source}: no such file or folder; check the path.")
    suffix = source.suffix.lower()
    if suffix in YAML or source.name.lower() in CLASS_FILES:  # the labels are beside or below it
        return _read_yolo(source.parent, find_class_lists(source.parent), image_folder, remarks)
    if suffix in TABLES:
        return read_table(source, remarks)
    if suffix not in (".json", ".xml"):
        description = other_tools.describe_suffix(suffix) or "neither a folder nor a file .json, .xml, .csv or .tsv"
        raise UserError(f"{source} is {description}.")
    recognised = _recognise(source)
    if recognised.format is None:
        description = recognised.description or "neither COCO, LabelMe nor Pascal VOC; export one of these"
        raise UserError(f"{source} is {description}.")
    return recognised.read(source, source, remarks)


class _Recognised(NamedTuple):
    """A JSON or XML file: one of the formats, or what else it is."""

    format: str | None = None
    read: Callable[[Path, Path, Remarks], Iterator[Annotation]] | None = None
    description: str | None = None


def _recognise(path: Path) -> _Recognised:
    if path.suffix.lower() == ".json":
        return _recognise_json(path)
    return _recognise_xml(path)


def _recognise_json(path: Path) -> _Recognised:
    content: Any = read_json(path)
    keys = content.keys() if isinstance(content, dict) else ()
    description = other_tools.describe_coco(content)
    if description is not None:
        return _Recognised(description=description)
    if "annotations" in keys and ("images" in keys or "categories" in keys):
        return _Recognised("COCO", read_coco)
    if "shapes" in keys:
        return _Recognised("LabelMe", read_labelme)
    return _Recognised(description=other_tools.describe_json(content))


def _recognise_xml(path: Path) -> _Recognised:
    with reading(path, ElementTree.ParseError, UnicodeError, LookupError):
        root = ElementTree.parse(path).getroot()
    description = other_tools.describe_xml(root)
    if root.tag != "annotation" or description is not None:
        return _Recognised(description=description)
    return _Recognised("Pascal VOC", lambda path, source, remarks: read_voc(path, root, source, remarks))


def _read_folder(
    folder: Path, image_folder: ImageFolder, remarks: Remarks, ignored: Collection[Path]
) -> Iterator[Annotation]:
    """Read the boxes of the first format in COCO, LabelMe, Pascal VOC, YOLO that a folder has; note the others."""
    by_format: dict[str, list[tuple[Path, _Recognised]]] = {"COCO": [], "LabelMe": [], "Pascal VOC": []}
    descriptions: dict[str, str] = {}
    for path in list_files(folder, (".json", ".xml")):
        if path.resolve() in ignored:
            continue
        recognised = _recognise(path)
        if recognised.format is not None:
            by_format[recognised.format].append((path, recognised))
        elif recognised.description is not None:
            descriptions[relative_name(path, folder)] = recognised.description
    for name, files in by_format.items():
        if not files:
            continue
        for other_format, other_files in by_format.items():
            if other_format == name:
                continue
            for path, _ in other_files:
                problem = f"files of {other_format} beside those of {name} are not read"
                remarks.note(problem, relative_name(path, folder))
        for path in list_files(folder, CLASS_FILES):
            remarks.note(f"labels of YOLO beside the files of {name} are not read", relative_name(path, folder))
        for other_name in descriptions:
            remarks.note(f"other files beside those of {name} are not read", other_name)
        return _read_files(files, folder, remarks)
    class_lists = find_class_lists(folder)
    if class_lists and not descriptions:
        return _read_yolo(folder, class_lists, image_folder, remarks)
    for name, description in descriptions.items():
        raise UserError(f"{folder / name} is {description}.")
    contents = describe_labels(folder) or other_tools.describe_folder(folder)
    if contents is not None:
        raise UserError(f"{folder} has {contents}.")
    raise UserError(
        f"{folder}: no JSON of COCO or LabelMe, no XML of Pascal VOC, and no data.yaml, "
        f"{' or '.join(CLASS_FILES[:2])} of YOLO."
    )


def _read_yolo(
    folder: Path, class_lists: list[ClassList], image_folder: ImageFolder, remarks: Remarks
) -> Iterator[Annotation]:
    return read_yolo(folder, class_lists, remarks, lambda name: bool(image_folder.candidates(name)))


def _read_files(files: Iterable[tuple[Path, _Recognised]], folder: Path, remarks: Remarks) -> Iterator[Annotation]:
    for path, recognised in files:
        yield from recognised.read(path, folder, remarks)
