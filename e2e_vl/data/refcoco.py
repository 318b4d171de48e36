"""RefCOCO, RefCOCO+ and RefCOCOg: expressions that refer to one annotated object of an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from e2e_vl.data.base import DataFiles, NoOptions, VLDataset, Wants, group_texts
from e2e_vl.data.formats.refer import ReferFiles
from e2e_vl.data.storage.record_errors import RAISE, RecordErrors
from e2e_vl.samples import ReferredBox, Sample, SampleText


class RefCOCODataset(VLDataset):
    """Expressions of one split, grouped by image.

    Args:
        images_root: folder of the image files named in the instances file.
        instances_file: COCO instances file with all annotations of the images.
        refs_file: REFER file.
        split: name of a split, by the rules of `refer.split_contains`.
        errors: what becomes of an error about one record.

    Attributes:
        expressions: the texts, in file order; their indices are text indices.

    Raises:
        FileNotFoundError, ValueError: see the readers; or a split without expressions.
    """

    known_files = ("images", "instances", "refs", "detections", "features")

    def __init__(
        self,
        images_root: str | Path,
        instances_file: str | Path,
        refs_file: str | Path,
        split: str,
        errors: RecordErrors = RAISE,
    ) -> None:
        self.images_root = Path(images_root).expanduser()
        self.refer = ReferFiles(refs_file, instances_file, errors)
        self.instances = self.refer.instances
        self.expressions = self.refer.in_split(split)
        self.groups = group_texts(expression.image_id for expression in self.expressions)
        self.parts = [{"split": split}]
        self.class_names = self.instances.class_names

    @classmethod
    def open(cls, files: DataFiles, options: NoOptions, split: str, wants: Wants) -> RefCOCODataset:
        """`data.files` holds `images`, `instances` and `refs`."""
        return cls(files.path("images"), files.path("instances"), files.path("refs"), split, files.errors)

    @classmethod
    def reads(cls, options: NoOptions, split: str, wants: Wants) -> tuple[str, ...]:
        return ("instances", *super().reads(options, split, wants))

    @classmethod
    def texts_of(cls, files: DataFiles, options: NoOptions, split: str) -> Iterable[str]:
        """All expressions of a split."""
        refer = ReferFiles(files.path("refs"), files.path("instances"))
        return [expression.sentence for expression in refer.in_split(split)]

    def __len__(self) -> int:
        """Number of expressions."""
        return len(self.expressions)

    def image_ids(self) -> Iterable[str]:
        return (str(self.expressions[texts[0]].image_id) for texts in self.groups)

    def sample(self, texts: Sequence[int]) -> Sample:
        """Some expressions about one image."""
        image_id = self.expressions[texts[0]].image_id
        # the `file_name` of a ref is not a file
        image = self.instances.sample_image(image_id, self.images_root / self.instances.images[image_id].file_name)
        return Sample((image,), tuple(self._text(index) for index in texts))

    def _text(self, index: int) -> SampleText:
        expression = self.expressions[index]
        annotation = self.instances.annotations[expression.ann_id]
        facts = {
            "ref_id": expression.ref_id,
            "sent_id": expression.sent_id,
            "image_id": expression.image_id,
            "ann_id": expression.ann_id,
            "sent": expression.sentence,
            "category": self.instances.class_names[annotation.class_index],
            "gt_box": list(annotation.box),
        }
        if expression.family is not None:
            facts["family"] = expression.family
        return SampleText(index, expression.sentence, facts, ReferredBox(annotation.box))
