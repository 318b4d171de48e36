"""RefCOCO, RefCOCO+ and RefCOCOg: find the object that an expression refers to.

Targets of a text: `box` float32 [4], the referred box in pixels of the resized image (scaled and flipped, not clamped).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from detector.images import ResizeRule
from detector.selection import SelectionRule
from e2e_vl.config import DataSettings
from e2e_vl.data.asked import Asked
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.detections import DetectionsFile
from e2e_vl.data.examples import Example, Request, TextExample, random_generator
from e2e_vl.data.features.stores import FeatureStore
from e2e_vl.data.files import NoOptions, read_options
from e2e_vl.data.image_source import BoxSource, ImageSource
from e2e_vl.data.images import Placement
from e2e_vl.data.refer import Expression, ReferFiles
from e2e_vl.text import mirror_words


class RefCOCODataset(Dataset):
    """Expressions of one split, grouped by image.

    A text is `[CLS] expression [SEP]`, all of segment 0. In a flipped image the tokens "left" and "right" are swapped
    (official VL-BERT code). All texts of one request share one image, so also its flip and its size.

    Args:
        images_root: folder of the image files named in the instances file.
        instances_file: COCO instances file with all annotations of the images (path or content).
        refs_file: REFER file.
        split: name of a split, by the rules of `refer.split_contains`.
        tokenizer: wordpiece tokenizer.
        resize: size of the network input; of several rules one is drawn at random per request (multi-scale training).
        box_source: where candidate boxes come from: "gt" = all annotations of the image, crowds too; "detections" = a
            file; "detections+gt" = the file's boxes, then all annotations; "online" = the detector proposes them;
            "precomputed" = boxes and features of a features file, no image is read.
        detections_file: MAttNet's detections (path or content); needed by the two sources that use it.
        features_file: region features by image id, opened with `open_features`; needed by the source "precomputed".
        selection: which of the detections file's boxes are kept, by score; None = all, in file order.
        flip_probability: chance to mirror the image; for training.
        seed: all randomness depends on (seed, epoch, first text of the request) only.
        channel_order: "BGR" or "RGB".
        with_objects: add the annotated objects, without crowds, as targets of the detection losses.
        blank_text: drop all words: the control that sees no text.
        blank_image: every pixel is the mean colour: the control that sees no image, only the candidate boxes.
        max_text_length: longest sequence in wordpieces, [CLS] and [SEP] included; longer expressions lose their last
            pieces and the record tells how many in `cut_wordpieces`. None = no limit.

    Attributes:
        expressions: the texts, in file order; their indices are text indices.
        groups: text indices of each image, images in order of first mention.

    Raises:
        FileNotFoundError, ValueError: see the readers; or a box source without its detections file, or an image of the
            split without detections.
    """

    # keys of `data.files`
    known_files = ("images", "instances", "refs", "detections", "features")

    def __init__(
        self,
        images_root: str | Path,
        instances_file: str | Path | CocoInstances,
        refs_file: str | Path,
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        resize: ResizeRule | Sequence[ResizeRule],
        *,
        box_source: BoxSource = "gt",
        detections_file: str | Path | DetectionsFile | None = None,
        features_file: str | Path | FeatureStore | None = None,
        selection: SelectionRule | None = None,
        flip_probability: float = 0.0,
        seed: int = 0,
        channel_order: str = "BGR",
        with_objects: bool = False,
        blank_text: bool = False,
        blank_image: bool = False,
        max_text_length: int | None = None,
    ) -> None:
        if max_text_length is not None and max_text_length < 2:
            raise ValueError(f"max_text_length is {max_text_length}, but [CLS] and [SEP] alone need 2")
        self.images_root = Path(images_root).expanduser()
        self.refer = ReferFiles(refs_file, instances_file)
        self.instances = self.refer.instances
        self.expressions = self.refer.in_split(split)
        self.split = split
        self.tokenizer = tokenizer
        self.box_source = box_source
        self.seed = seed
        self.blank_text = blank_text
        self.max_text_length = max_text_length
        self.images = ImageSource(
            resize,
            box_source=box_source,
            instances=self.instances,
            detections_file=detections_file,
            features_file=features_file,
            selection=selection,
            flip_probability=flip_probability,
            channel_order=channel_order,
            with_objects=with_objects,
            blank_image=blank_image,
            name=type(self).__name__,
        )

        by_image: dict[int, list[int]] = {}
        for index, expression in enumerate(self.expressions):
            by_image.setdefault(expression.image_id, []).append(index)
        self.groups = list(by_image.values())

        self.images.require_images(by_image, split)

    @classmethod
    def from_settings(
        cls,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        *,
        boxes: BoxSource,
        training: bool,
        seed: int,
        channel_order: str,
        with_objects: bool,
    ) -> RefCOCODataset:
        """Build from a run's settings; `data.files` holds `images`, `instances`, `refs` and maybe `detections`.

        In evaluation the last of the short edges is used and nothing is mirrored.
        """
        read_options(NoOptions, settings.config, "data.config")
        root, files = Path(settings.root).expanduser(), settings.files
        for name in ("images", "instances", "refs"):
            if name not in files:
                raise ValueError(f"data.files.{name} is not set; it names the {name} of {settings.name}.")
        return cls(
            root / files["images"],
            root / files["instances"],
            root / files["refs"],
            split,
            tokenizer,
            box_source=boxes,
            detections_file=root / files["detections"] if "detections" in files else None,
            features_file=root / files["features"] if "features" in files else None,
            seed=seed,
            channel_order=channel_order,
            with_objects=with_objects,
            blank_text=settings.blank_text,
            max_text_length=settings.max_text_length,
            **ImageSource.options_of(settings, training=training),
        )

    @classmethod
    def texts_of(cls, settings: DataSettings, split: str) -> list[str]:
        """All expressions of a split, to build a vocabulary from."""
        root = Path(settings.root).expanduser()
        refer = ReferFiles(root / settings.files["refs"], root / settings.files["instances"])
        return [expression.sentence for expression in refer.in_split(split)]

    def check_classes(self, num_classes: int) -> None:
        """Raises ValueError if a detector with `num_classes` foreground classes cannot learn these annotations."""
        self.images.check_classes(num_classes)

    def __len__(self) -> int:
        """Number of texts (expressions)."""
        return len(self.expressions)

    def __getitem__(self, request: Request) -> Example:
        """Load the request's image once, with all its texts.

        Raises:
            FileNotFoundError: the image file is missing; names image id and path.
            ValueError: the image cannot be read, has another size than the instances file says, or a detected box lies
                outside it.
        """
        generator = random_generator(self.seed, request.epoch, request.texts[0])
        image = self.refer.image(self.expressions[request.texts[0]])
        path = self.images_root / image.file_name
        example_image, placement = self.images.load(image.id, path, generator)
        return Example([example_image], [self._text(index, path, placement) for index in request.texts])

    @staticmethod
    def example_of(
        asked: Asked, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, channel_order: str
    ) -> Example:
        """A user's expression about an image; without boxes the detector proposes them."""
        asked.refuse_choices("A referring expression")
        image, _ = asked.load(settings, channel_order, asked.boxes)
        input_ids, _ = _encode(tokenizer.tokenize(asked.text), tokenizer, settings.max_text_length)
        text = TextExample(input_ids, np.zeros_like(input_ids), looks_at=(0,), targets={}, record=asked.record())
        return Example([image], [text])

    def _text(self, index: int, path: Path, placement: Placement) -> TextExample:
        expression = self.expressions[index]
        tokens = [] if self.blank_text else self.tokenizer.tokenize(expression.sentence)
        if placement.flipped:
            tokens = mirror_words(tokens)
        input_ids, num_cut = _encode(tokens, self.tokenizer, self.max_text_length)
        box = np.array(self.refer.annotation(expression).box, dtype=np.float64)
        return TextExample(
            input_ids=input_ids,
            segment_ids=np.zeros_like(input_ids),
            looks_at=(0,),
            targets={"box": placement.move_boxes(box)[0].astype(np.float32)},
            record={"text_index": index, **self._record(expression, path, placement, num_cut)},
        )

    def _record(self, expression: Expression, path: Path, placement: Placement, num_cut: int) -> dict[str, Any]:
        """Plain values for predictions and metrics; `gt_box` in pixels of the stored, unflipped image."""
        record: dict[str, Any] = {
            "ref_id": expression.ref_id,
            "sent_id": expression.sent_id,
            "image_id": expression.image_id,
            "ann_id": expression.ann_id,
            "sent": expression.sentence,
            "gt_box": list(self.refer.annotation(expression).box),
            "file_name": str(path),
            "image_size": list(placement.original_size),
            "flipped": placement.flipped,
        }
        if expression.family is not None:
            record["family"] = expression.family
        if num_cut:
            record["cut_wordpieces"] = num_cut
        if self.box_source == "gt":
            annotations = self.instances.by_image[expression.image_id]
            record["candidate_ann_ids"] = [annotation.id for annotation in annotations]
        return record


def _encode(tokens: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> tuple[np.ndarray, int]:
    """`[CLS] tokens [SEP]` as int64 [L], and how many wordpieces were cut off to keep to the longest length."""
    num_cut = 0 if max_length is None else max(len(tokens) + 2 - max_length, 0)
    tokens = [tokenizer.cls_token, *tokens[: len(tokens) - num_cut], tokenizer.sep_token]
    return np.array(tokenizer.convert_tokens_to_ids(tokens), dtype=np.int64), num_cut
