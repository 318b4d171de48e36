"""MDETR's files of grounding pre-training: captions of which each box knows the words that name it.

Files (`data.files`, relative to `data.root`; {split} is the split)
    annotations  final_mixed_{split}.json (COCO, Visual Genome), final_flickr_separateGT_{split}.json,
                 finetune_refcoco+_{split}.json, or gRefCOCO's finetune_grefcoco_{split}.json
    images       folder of the images; {source} is the `data_source` of an image, "coco" or "vg" in final_mixed, see
                 `data.config.image_folders`
    detections, features   boxes by image id, which is the name of the image's file without its suffix

The format is COCO's, with a caption per entry of `images`, so that a photo has as many entries as captions. The
`tokens_positive` of an annotation are spans of characters. Facts: `datasets/coco.py`, `datasets/mixed.py`,
`scripts/pre-training` and `scripts/fine-tuning` of github.com/ashkamath/mdetr; for expressions without a target,
`mdetr/scripts/fine-tuning/grefexp_coco_format.py` of github.com/henghuiding/gRefCOCO.

- Words of one annotation with only spaces between them are one phrase; other spans are phrases of their own. The files
  of Flickr30K Entities list their phrases (`tokens_positive_eval`), whose spans are left as they are.
- `tokens_negative` are words of which the files do not say what they name; they are not read.
- Crowds are skipped, as in MDETR's code. Its boxes without an area are skipped and counted, and so are boxes outside
  their image, which its code makes empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from typing_extensions import override

from detector.errors import UserError
from e2e_vl.data.base import DataFiles
from e2e_vl.data.box_checks import check_file_boxes
from e2e_vl.data.config import MDETRDatasetConfig
from e2e_vl.data.grounded import (
    GroundedDataset,
    GroundedText,
    PhraseCollector,
    Span,
    gather_boxes,
    gather_phrases,
    join_spans,
)
from e2e_vl.data.overlap import FLICKR, VISUAL_GENOME
from e2e_vl.data.tables import SerializedList, stream_list
from e2e_vl.io import Count, FourNumbers, Id, Name, Record, Side

_SideAsText = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,8}$")]  # in the files of Flickr30K Entities
_NAMESPACES = {"vg": VISUAL_GENOME, "flickr": FLICKR}  # by `data_source` or `dataset_name`; COCO's file names need none


class _CaptionedImage(Record):
    id: Id  # of the caption
    file_name: Name
    caption: str
    height: Side | _SideAsText
    width: Side | _SideAsText
    dataset_name: str | None = None
    data_source: str | None = None
    original_img_id: Id | None = None  # of the image, in the files of Flickr30K Entities
    original_id: Id | None = None  # the same in the others
    sentence_id: Count | None = None
    tokens_positive_eval: list[list[Span]] | None = None  # the phrases to evaluate


class _BoxWithWords(Record):
    image_id: Id  # of the caption
    bbox: FourNumbers  # x, y, width, height
    tokens_positive: list[Span]
    iscrowd: int | None = 0  # gRefCOCO's files have -1 where there is no target
    empty: bool = False  # gRefCOCO: the words name nothing in the image


class _NamedBox(Record, array_like=True):
    """An annotation as it is kept until its caption is read."""

    spans: list[Span]
    box: FourNumbers | None  # xyxy; None: the words name nothing in the image


def read_mdetr(path: Path, options: MDETRDatasetConfig) -> Iterator[GroundedText]:
    """Read the texts of a file, in file order.

    Blank captions are skipped. As expressions, so are captions of which no box is left.
    """
    collector = PhraseCollector(path)
    named_boxes, rows_of_caption = _read_annotations(path)
    source_of: dict[str, str] = {}  # by file name
    for caption in stream_list(path, _CaptionedImage, "images"):
        words = caption.caption
        rows = rows_of_caption.pop(str(caption.id), [])
        if not words.strip():
            collector.skipped.add("blank captions", caption.id)
            continue
        source = caption.data_source or ""
        if source_of.setdefault(caption.file_name, source) != source:
            raise UserError(
                f"{path}: image {caption.id} is {caption.file_name} of {source!r}, and an earlier one is the file of "
                f"the same name of {source_of[caption.file_name]!r}; give the files of several sources different names"
            )
        size = (int(caption.height), int(caption.width))
        named = []
        is_empty = False
        for row in rows:
            entry = named_boxes[row]
            spans = collector.usable_spans(entry.spans, words, caption.id)
            if caption.tokens_positive_eval is None:
                spans = join_spans(spans, words)
            if entry.box is None:
                is_empty = True
                named.append((spans, []))
                continue
            boxes = collector.usable_boxes([entry.box], size, caption.id)
            if boxes:
                named.append((spans, boxes))
        referred_boxes = gather_boxes(named)
        if options.texts == "expressions" and not referred_boxes and not is_empty:
            collector.skipped.add("expressions without a box", caption.id)
            continue
        original_id = caption.original_id if caption.original_img_id is None else caption.original_img_id
        namespace = _NAMESPACES.get(source or caption.dataset_name or "")
        yield GroundedText(
            caption.id,
            caption.file_name,
            size,
            words,
            phrases=gather_phrases(named),
            referred_boxes=referred_boxes,
            source=source,
            original_id=original_id,
            namespace=None if original_id is None else namespace,
            sentence=caption.sentence_id,
        )
    if rows_of_caption:
        caption_id = next(iter(rows_of_caption))
        raise UserError(
            f"{path}: an annotation is about image {caption_id}, which the file does not list; remove it, or download "
            "the file again"
        )
    check_file_boxes(collector.boxes, collector.sizes, collector.image_ids, str(path))
    collector.skipped.log()


def _read_annotations(path: Path) -> tuple[SerializedList[_NamedBox], dict[str, list[int]]]:
    """Return the annotations, and the rows of each caption among them, by its id."""
    rows_of_caption: dict[str, list[int]] = defaultdict(list)

    def named_boxes() -> Iterator[_NamedBox]:
        row = 0
        for annotation in stream_list(path, _BoxWithWords, "annotations"):
            if annotation.iscrowd == 1:
                continue
            rows_of_caption[str(annotation.image_id)].append(row)
            x, y, width, height = annotation.bbox
            box = None if annotation.empty else (x, y, x + width, y + height)
            yield _NamedBox(annotation.tokens_positive, box)
            row += 1

    return SerializedList(named_boxes(), _NamedBox), rows_of_caption


class MDETRDataset(GroundedDataset):
    """Captions or expressions in MDETR's files."""

    options: MDETRDatasetConfig

    @classmethod
    @override
    def texts_in(cls, files: DataFiles, options: MDETRDatasetConfig, split: str) -> Iterator[GroundedText]:
        return read_mdetr(files.path("annotations", split=split), options)

    @override
    def source_folder(self, source: str) -> str:
        return self.options.image_folders.get(source, source)
