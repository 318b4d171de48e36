"""Tables of boxes and of expressions: CSV as spreadsheets, Label Studio's, TensorFlow's and makesense's users write it.

The first line names the columns, in any order and capital letters. The separator is a comma, a semicolon, a tab or a
bar. What an unquoted separator or an unclosed quote does to a row cannot be undone, so such rows are refused.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from detector.errors import UserError
from detector.io import read_json
from e2e_vl.data.annotation_tools.records import Annotation, Remarks, Row, split_name
from e2e_vl.io import FourNumbers, read_text

TABLES = (".csv", ".tsv", ".txt")
SEPARATORS = ",;\t|"
NAMES = {  # column -> its names, in small letters and without spaces, dots, dashes and underscores
    "image": "image filename file imagename imagepath imagefile imagefilename filepath path photo img imageid",
    "label": "label class category labelname classname categoryname",
    "text": "text expression caption sentence phrase description referringexpression",
    "split": "split set subset",
    "box": "box boxid annotationid annid",
    "is_crowd": "iscrowd",
    "x": "x bboxx boxx",
    "y": "y bboxy boxy",
    "width": "width w bboxwidth boxwidth bboxw",
    "height": "height h bboxheight boxheight bboxh",
    "x1": "x1 xmin left bboxx1 bboxxmin",
    "y1": "y1 ymin top bboxy1 bboxymin",
    "x2": "x2 xmax right bboxx2 bboxxmax",
    "y2": "y2 ymax bottom bboxy2 bboxymax",
    "image_width": "imagewidth imgwidth",
    "image_height": "imageheight imgheight",
    "rotation": "rotation angle theta",
}
_COLUMN_OF: dict[str, str] = {}
for _column, _names in NAMES.items():
    _COLUMN_OF |= dict.fromkeys(_names.split(), _column)
_MISSING = ("", "nan", "none", "null")  # how pandas and spreadsheets write an empty cell
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_IMAGE_AND_BOX = "image, label, x, y, width and height (or xmin, ymin, xmax and ymax)"


class _Line(NamedTuple):
    """The cells of a row by column; empty ones are left out."""

    where: str
    cells: dict[str, str]

    @property
    def split(self) -> str:
        return split_name(self.cells.get("split", ""))

    @property
    def is_crowd(self) -> bool:
        return self.cells.get("is_crowd", "").casefold() in ("1", "true", "yes")


def read_rows(path: Path, remarks: Remarks | None = None) -> list[Row]:
    """Read the rows of a table or of a JSON file.

    A box in a table is x, y, width, height or xmin, ymin, xmax, ymax.

    Args:
        remarks: collects rows that cannot be read; by default they raise a UserError.
    """
    if path.suffix.lower() not in TABLES:
        rows = read_json(path, list[Row])
        for number, row in enumerate(rows, start=1):
            row.where = f"record {number}"
            row.text = (row.text or "").strip() or None
        return rows
    collected = Remarks(path) if remarks is None else remarks
    rows = []
    for line in _read_lines(path, collected, need_boxes=False):
        try:
            corners = _corners(line.cells)
        except ValueError as error:
            collected.refuse("numbers that cannot be read", f"{line.where} ({error})")
            continue
        box: FourNumbers | str | None = _plain_id(line.cells.get("box"))
        if corners is not None:
            x1, y1, x2, y2 = corners
            box = (x1, y1, x2 - x1, y2 - y1)
        row = Row(
            image=line.cells.get("image", ""),
            label=line.cells.get("label", ""),
            box=box,
            text=line.cells.get("text"),
            split=line.split,
            is_crowd=line.is_crowd,
            where=line.where,
        )
        if not row.image:
            collected.refuse("rows without an image", line.where)
        rows.append(row)
    if remarks is None:
        collected.raise_errors()
    return rows


def read_table(path: Path, remarks: Remarks) -> Iterator[Annotation]:
    """Read the boxes of a table; the id of a box is the number of its row, from 1."""
    for number, line in enumerate(_read_lines(path, remarks, need_boxes=True), start=1):
        try:
            corners = _corners(line.cells)
            image_size = _image_size(line.cells, corners)
            rotation = _number(line.cells, "rotation") if "rotation" in line.cells else 0
        except ValueError as error:
            remarks.refuse("numbers that cannot be read", f"{line.where} ({error})")
            continue
        image = line.cells.get("image", "")
        label = line.cells.get("label", "")
        if corners is None or not image or not label:
            remarks.refuse(f"rows without {_IMAGE_AND_BOX}", line.where)
            continue
        if rotation:
            remarks.refuse("rotated boxes, which a table cannot hold", line.where, "give the upright boxes around them")
            continue
        yield Annotation(
            line.where,
            image,
            label,
            corners,
            id=number,
            states_corners=line.cells.keys() >= {"x2", "y2"},
            image_size=image_size,
            text=line.cells.get("text"),
            split=line.split,
            is_crowd=line.is_crowd,
        )


def _read_lines(path: Path, remarks: Remarks, *, need_boxes: bool) -> Iterator[_Line]:
    """Read the rows below the first one, which names the columns; blank rows are left out."""
    text = read_text(path)
    first, _, rest = text.partition("\n")
    line_number = 1
    if re.fullmatch(r"sep=.", first.strip()):  # Excel's
        text = rest
        line_number = 2
    separator = _find_separator(text.partition("\n")[0])
    reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        where = f"line {line_number + reader.line_num}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            remarks.refuse("a row whose quotes do not fit", f"{where} ({error})", 'write " within a quoted text as ""')
            return
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = _find_columns(cells, path)
            has_boxes = {"label", "x", "y"} <= set(header) or {"label", "x1", "y1"} <= set(header)
            if "image" not in header or (need_boxes and not has_boxes):
                raise UserError(
                    f"{path}: the first line must name the columns, such as {_IMAGE_AND_BOX}; it is "
                    f"'{', '.join(cells)}'."
                )
            continue
        if any("\n" in cell for cell in cells):
            remarks.refuse("texts over several lines, maybe an unclosed quote", where, "write a text in one line")
        elif any(cell.strip() for cell in cells[len(header) :]):
            problem = f"rows with more than {len(header)} columns, maybe '{separator}' in a text"
            remarks.refuse(problem, where, 'put texts in quotes ("…")')
        else:
            yield _Line(where, _name_cells(header, cells, has_decimal_comma=separator != ","))


def _find_separator(first_line: str) -> str:
    """Return the separator that gives the first line most columns with known names.

    csv.Sniffer guesses from the letters of all lines, so that texts mislead it.
    """
    counts = {}
    for separator in SEPARATORS:
        names = [_column_name(cell) for cell in first_line.split(separator)]
        counts[separator] = (sum(name in _COLUMN_OF for name in names), len(names))
    return max(SEPARATORS, key=counts.__getitem__)


def _column_name(cell: str) -> str:
    return re.sub(r"[\W_]+", "", cell).casefold()


def _find_columns(cells: list[str], path: Path) -> list[str]:
    """Return the column of each cell of the first line; "" stands for a column that is not known.

    Where several names mean the same column, the first one in `NAMES` is taken: `image` before `path`.
    """
    names = [_column_name(cell) for cell in cells]
    columns = [_COLUMN_OF.get(name, "") for name in names]
    for column in set(columns) - {""}:
        positions = [position for position, other in enumerate(columns) if other == column]
        preference = NAMES[column].split()
        positions.sort(key=lambda position: preference.index(names[position]))
        distinct_names = {names[position] for position in positions}
        if len(distinct_names) < len(positions):
            raise UserError(f"{path}: its first line names the column {names[positions[0]]} twice; rename one of them.")
        for position in positions[1:]:
            columns[position] = ""
    if "regionshapeattributes" in names:
        raise UserError(f"{path} is VIA's CSV; export Annotations (COCO format) instead.")
    return columns


def _name_cells(header: list[str], cells: list[str], *, has_decimal_comma: bool) -> dict[str, str]:
    """Return the values of a row by column, without empty cells and cells of unknown columns."""
    values = {}
    for column, cell in zip(header, cells, strict=False):  # a short row ends with empty cells
        value = cell.strip()
        if not column or value.casefold() in _MISSING:
            continue
        is_number = column not in ("image", "label", "text")
        if is_number and has_decimal_comma and _DECIMAL_COMMA.fullmatch(value):
            value = value.replace(",", ".")
        values[column] = value
    return values


def _corners(cells: Mapping[str, str]) -> FourNumbers | None:
    """Return x1, y1, x2, y2; None without a box. `left, top, width, height` are a box too.

    Raises:
        ValueError: a cell is not a number, or only a part of the box is there.
    """
    if not cells.keys() & {"x", "y", "x1", "y1", "x2", "y2"}:
        return None
    x1 = _number(cells, "x1" if "x1" in cells else "x")
    y1 = _number(cells, "y1" if "y1" in cells else "y")
    if cells.keys() & {"x2", "y2"}:
        return x1, y1, _number(cells, "x2"), _number(cells, "y2")
    return x1, y1, x1 + _number(cells, "width"), y1 + _number(cells, "height")


def _image_size(cells: Mapping[str, str], corners: FourNumbers | None) -> tuple[int, int] | None:
    """Return (width, height) of the image, from columns for it or from width and height beside corners.

    The latter may also be those of the box; then the row states no size of its image.
    """
    if cells.keys() >= {"image_width", "image_height"}:
        return round(_number(cells, "image_width")), round(_number(cells, "image_height"))
    if corners is None or not cells.keys() >= {"x2", "y2", "width", "height"}:
        return None
    x1, y1, x2, y2 = corners
    width = _number(cells, "width")
    height = _number(cells, "height")
    if abs(x2 - x1 - width) <= 1 and abs(y2 - y1 - height) <= 1:
        return None
    return round(width), round(height)


def _number(cells: Mapping[str, str], column: str) -> float:
    """Return the finite number in a cell.

    Raises:
        ValueError: the cell is empty or not a finite number.
    """
    value = float(cells.get(column, "nan"))
    if not math.isfinite(value):
        raise ValueError(f"{column} is {cells.get(column, 'missing')}")
    return value


def _plain_id(value: str | None) -> str | None:
    """Return an id without what a spreadsheet may add to it: 12.0 is 12."""
    if value is not None and re.fullmatch(r"\d+\.0", value):
        return value.removesuffix(".0")
    return value
