"""RefCOCO, RefCOCO+ and RefCOCOg in parquet files of the Hugging Face hub.

Files (`data.files`, relative to `data.root`; {split} is the split)
    parquet     a file, a folder or a pattern such as data/{split}-*.parquet
    images      folder of COCO's train2014, for files without images inside
    instances   (optional) COCO instances with all annotated objects of the images, for boxes gt and detection losses
    detections, features   boxes by COCO's image id

The columns say which layout the files have:

    ref_list  a row per image, with REFER's refs and annotations (`jxu124/refcoco-benchmark`; val and test splits)
    answer    a row per object with its expressions (`lmms-lab/RefCOCO`, `RefCOCOplus`, `RefCOCOg`; val and test splits)
    raw_anns  a row per ref, without images (`jxu124/refcoco`, `refcocoplus`, `refcocog`; the training split, too)

In all of them, boxes are COCO's [x, y, width, height]; the column `bbox` of the last one has corners and is not read.
The columns are those of the data sets' cards on huggingface.co, and the boxes of the second layout are read as in
`lmms_eval/tasks/refcoco/utils_rec.py` of github.com/EvolvingLMMs-Lab/lmms-eval.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from detector.errors import UserError
from detector.io import decode_json
from e2e_vl.data.base import DataFiles, DataNeeds, RecordDataset
from e2e_vl.data.box_checks import check_file_boxes, require_pixels
from e2e_vl.data.coco import open_instances
from e2e_vl.data.config import NoDatasetConfig
from e2e_vl.data.official_sizes import JOINED_ROWS
from e2e_vl.data.overlap import COCO
from e2e_vl.data.refcoco import Expression, Ref, RefCOCODataset, Sentence
from e2e_vl.data.tables import SerializedDict, SkippedRecords, drop_repeats
from e2e_vl.io import FourNumbers, Id, Name, Record, Side, box_corners
from e2e_vl.parquet import IMAGE, ParquetFiles
from e2e_vl.samples import PhraseBoxes, ReferredBoxes, SampleImage, SampleText

logger = logging.getLogger(__name__)

# COCO_train2014_000000581857.jpg, and as REFER names it, with the number of an annotation
_COCO_NAME = re.compile(r"COCO_[a-z]+20[0-9]{2}_([0-9]{12})(_[0-9]+)*")


class _Annotation(Record):
    bbox: FourNumbers  # x, y, width, height


class _Image(Record):
    id: Id
    file_name: Name
    width: Side
    height: Side


class _ListedRef(Record):
    ref_info: Ref
    ann_info: _Annotation


class _RowOfImage(Record):
    image_info: _Image
    ref_list: list[_ListedRef]


class _RowOfObject(Record):
    question_id: Id
    file_name: Name
    bbox: FourNumbers  # x, y, width, height
    answer: list[str]  # the expressions


class _RowOfRef(Ref, kw_only=True):
    raw_anns: str  # JSON of the annotation
    raw_image_info: str  # JSON of the image


class ParquetExpression(Expression, array_like=True):
    """An expression about one object, whose annotation may be unknown."""

    @property
    @override
    def truth(self) -> ReferredBoxes:
        return ReferredBoxes(self.boxes, self.ann_ids or None, self.category)


class ParquetImage(Record, array_like=True):
    """An image of a parquet file."""

    row: int  # the first one that has it
    file_name: str
    size: tuple[int, int] | None  # (height, width); None: the file does not say it


class _ReferredObject(NamedTuple):
    """An object and the expressions about it, whichever layout it comes from."""

    image_id: Id
    image: ParquetImage
    ref: Ref
    bbox: FourNumbers  # x, y, width, height


def _objects_by_image(files: ParquetFiles) -> Iterator[_ReferredObject]:
    """Yield the objects of files with a row per image."""
    for number, row in enumerate(files.rows(_RowOfImage)):
        info = row.image_info
        image = ParquetImage(number, info.file_name, (info.height, info.width))
        for listed in row.ref_list:
            yield _ReferredObject(info.id, image, listed.ref_info, listed.ann_info.bbox)


def _objects_by_row(files: ParquetFiles) -> Iterator[_ReferredObject]:
    """Yield the objects of files with a row per object.

    A sentence is named by its row and its position there. No column names the annotation.
    """
    for number, row in enumerate(files.rows(_RowOfObject)):
        stem = PurePosixPath(row.file_name).stem
        match = _COCO_NAME.fullmatch(stem)
        image_id = stem if match is None else int(match[1])
        sentences = [Sentence(f"{number}.{position}", words) for position, words in enumerate(row.answer)]
        ref = Ref(row.question_id, [], image_id, "", sentences)
        yield _ReferredObject(image_id, ParquetImage(number, row.file_name, None), ref, row.bbox)


def _objects_by_ref(files: ParquetFiles) -> Iterator[_ReferredObject]:
    """Yield the objects of files with a row per ref."""
    for number, row in enumerate(files.rows(_RowOfRef)):
        where = files.name_of(number)
        annotation = decode_json(row.raw_anns, f"{where}: raw_anns", _Annotation)
        info = decode_json(row.raw_image_info, f"{where}: raw_image_info", _Image)
        image = ParquetImage(number, info.file_name, (info.height, info.width))
        yield _ReferredObject(info.id, image, row, annotation.bbox)


_LAYOUTS = {"ref_list": _objects_by_image, "answer": _objects_by_row, "raw_anns": _objects_by_ref}  # by a column


def read_objects(files: ParquetFiles) -> Iterator[_ReferredObject]:
    """Yield the objects of files of any layout, in file order."""
    for column, read in _LAYOUTS.items():
        if column in files.columns:
            return read(files)
    raise UserError(
        f"{files.paths[0]}: the columns {', '.join(files.columns)} are of no known data set; there must be one of "
        f"{', '.join(_LAYOUTS)}"
    )


class ParquetRefCOCODataset(RecordDataset):
    """Expressions of one split, grouped by image; each expression is one phrase."""

    # those of REFER's files are not read: a run on them is evaluated on these by `data.name` and `data.files.parquet`
    file_keys = (*RefCOCODataset.file_keys, "parquet")
    id_namespace = COCO
    has_phrases = True

    def __init__(self, files: DataFiles, options: NoDatasetConfig, split: str, needs: DataNeeds) -> None:
        path = files.path("parquet", split=split)
        self.parquet = ParquetFiles(path)
        if len(self.parquet) in JOINED_ROWS:
            logger.warning("%s has %s; see docs/real_data.md.", path, JOINED_ROWS[len(self.parquet)])
        self.folder = None
        if IMAGE not in self.parquet.columns:
            self.folder = files.path("images", split=split)
        images: dict[str, ParquetImage] = {}
        expressions: list[ParquetExpression] = []
        skipped = SkippedRecords(path)
        for referred in read_objects(self.parquet):
            images.setdefault(str(referred.image_id), referred.image)
            expressions += self._expressions(referred, skipped)
        expressions = list(drop_repeats(expressions, skipped, "sentences"))
        skipped.log()
        self.images = SerializedDict(images.items(), ParquetImage, str(path))
        self._check_boxes(expressions, str(path))
        self.set_texts(expressions, f"{path}: sentence")
        self.split_values = [{"split": split}]
        self.instances = None
        if needs.annotations:
            [self.instances] = open_instances(files, self.split_values, self.image_keys())
            self.class_names = self.instances.class_names

    def _expressions(self, referred: _ReferredObject, skipped: SkippedRecords) -> Iterator[ParquetExpression]:
        """Yield the expressions about an object that are not blank."""
        where = self.parquet.name_of(referred.image.row)
        ref = referred.ref
        box = box_corners(referred.bbox, where)
        for sentence in ref.sentences or ():
            if not sentence.sent.strip():
                skipped.add("blank sentences", sentence.sent_id)
                continue
            yield ParquetExpression(
                ref.ref_id,
                sentence.sent_id,
                ann_ids=tuple(ref.ann_ids),
                image_id=referred.image_id,
                split=ref.split,
                words=sentence.sent,
                category=None,
                boxes=(box,),
            )

    def _check_boxes(self, expressions: list[ParquetExpression], where: str) -> None:
        """Check all boxes together; their images' sizes only where the file says them."""
        boxes = np.array([expression.boxes[0] for expression in expressions], dtype=np.float64).reshape(-1, 4)
        require_pixels(boxes, where)
        image_ids = [expression.image_id for expression in expressions]
        sizes = [self.images[image_id].size for image_id in image_ids]
        if sizes and None not in sizes:
            check_file_boxes(boxes, np.array(sizes)[:, ::-1], image_ids, where)

    @classmethod
    @override
    def texts_of(cls, files: DataFiles, options: NoDatasetConfig, split: str) -> Iterable[str]:
        for referred in read_objects(ParquetFiles(files.path("parquet", split=split))):
            for sentence in referred.ref.expressions:
                yield sentence.sent

    @override
    def contents(self) -> Iterable[np.ndarray]:
        yield from super().contents()
        if self.instances is not None:
            yield from map(self.instances.encoded, self.image_ids())

    @override
    def image(self, name: str, text: int) -> SampleImage:
        image = self.images[name]
        if self.folder is None:
            file = functools.partial(self.parquet.image, image.row)
        else:
            file = self.folder / image.file_name
        if self.instances is None:
            return SampleImage(name, file, image.size)
        return self.instances.sample_image(name, file)

    @override
    def text(self, index: int) -> SampleText:
        expression = self.texts[index]
        phrases = PhraseBoxes(((0, len(expression.words)),), (np.array(expression.boxes),))
        return dataclasses.replace(super().text(index), phrases=phrases)
