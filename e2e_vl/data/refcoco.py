"""RefCOCO, RefCOCO+ and RefCOCOg: find the object that an expression refers to.

Targets of a text: `box` float32 [4], the referred box in pixels of the resized image (scaled and flipped, not clamped).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from detector.boxes import check_boxes
from detector.images import ResizeRule
from detector.selection import SelectionRule, select_regions
from e2e_vl.config import DataSettings
from e2e_vl.data.coco import CocoAnnotation, CocoImage, CocoInstances, object_labels
from e2e_vl.data.detections import DetectionsFile
from e2e_vl.data.examples import Example, ImageExample, Objects, Request, TextExample, random_generator
from e2e_vl.data.features.stores import FeatureStore, open_features
from e2e_vl.data.images import Placement, read_image
from e2e_vl.data.refer import Expression, ReferFiles

BoxSource = Literal["gt", "detections", "detections+gt", "online", "precomputed"]
_MIRRORED_WORDS = {"left": "right", "right": "left"}


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
        max_text_length: longest sequence in wordpieces, [CLS] and [SEP] included; longer expressions lose their last
            pieces and the record tells how many in `cut_wordpieces`. None = no limit.

    Attributes:
        expressions: the texts, in file order; their indices are text indices.
        groups: text indices of each image, images in order of first mention.

    Raises:
        FileNotFoundError, ValueError: see the readers; or a box source without its detections file, or an image of the
            split without detections.
    """

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
        max_text_length: int | None = None,
    ) -> None:
        if box_source not in get_args(BoxSource):
            raise ValueError(f"unknown box source {box_source!r}; choose one of {', '.join(get_args(BoxSource))}")
        if max_text_length is not None and max_text_length < 2:
            raise ValueError(f"max_text_length is {max_text_length}, but [CLS] and [SEP] alone need 2")
        if not 0 <= flip_probability <= 1:
            raise ValueError(f"flip_probability is {flip_probability}, expected a number from 0 to 1")
        self.images_root = Path(images_root).expanduser()
        self.refer = ReferFiles(refs_file, instances_file)
        self.instances = self.refer.instances
        self.expressions = self.refer.in_split(split)
        self.split = split
        self.tokenizer = tokenizer
        self.resize_rules = [resize] if isinstance(resize, ResizeRule) else list(resize)
        if not self.resize_rules:
            raise ValueError("RefCOCODataset needs at least one resize rule")
        self.box_source = box_source
        self.selection = selection
        self.flip_probability = flip_probability
        self.seed = seed
        self.channel_order = channel_order
        self.with_objects = with_objects
        self.blank_text = blank_text
        self.max_text_length = max_text_length

        by_image: dict[int, list[int]] = {}
        for index, expression in enumerate(self.expressions):
            by_image.setdefault(expression.image_id, []).append(index)
        self.groups = list(by_image.values())

        self.features: FeatureStore | None = None
        if box_source == "precomputed":
            self.features = self._open_features(features_file, by_image)

        self.detections: DetectionsFile | None = None
        if box_source in ("detections", "detections+gt"):
            if detections_file is None:
                raise ValueError(f"box source {box_source!r} needs a detections file; give one or choose gt or online")
            is_read = isinstance(detections_file, DetectionsFile)
            self.detections = detections_file if is_read else DetectionsFile(detections_file)
            self.detections.require_images(by_image)

    def _open_features(self, file: str | Path | FeatureStore | None, image_ids: Iterable[int]) -> FeatureStore:
        if file is None:
            raise ValueError("box source 'precomputed' needs a features file; give one as data.files.features")
        if self.flip_probability > 0:
            raise ValueError("precomputed features are those of images as they are, not mirrored; set data.flip to 0")
        store = file if isinstance(file, FeatureStore) else open_features(file)
        missing = [image_id for image_id in image_ids if str(image_id) not in store]
        if missing:
            raise ValueError(
                f"{store.path}: has no features of image {missing[0]} and {len(missing) - 1} more of the split "
                f"{self.split}; extract them, with the instances file as the list of images"
            )
        return store

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
        root, files = Path(settings.root), settings.files
        for name in ("images", "instances", "refs"):
            if name not in files:
                raise ValueError(f"data.files.{name} is not set; it names the {name} of {settings.name}.")
        sizes = settings.resize.short_edge if training else settings.resize.short_edge[-1:]
        selection = settings.boxes.selection
        return cls(
            root / files["images"],
            root / files["instances"],
            root / files["refs"],
            split,
            tokenizer,
            [ResizeRule(size, settings.resize.long_edge, settings.resize.rounding) for size in sizes],
            box_source=boxes,
            detections_file=root / files["detections"] if "detections" in files else None,
            features_file=root / files["features"] if "features" in files else None,
            selection=SelectionRule(selection.min_score, selection.min_regions, selection.max_regions),
            flip_probability=settings.flip if training else 0.0,
            seed=seed,
            channel_order=channel_order,
            with_objects=with_objects,
            blank_text=settings.blank_text,
            max_text_length=settings.max_text_length,
        )

    @classmethod
    def texts_of(cls, settings: DataSettings, split: str) -> list[str]:
        """All expressions of a split, to build a vocabulary from."""
        root = Path(settings.root)
        refer = ReferFiles(root / settings.files["refs"], root / settings.files["instances"])
        return [expression.sentence for expression in refer.in_split(split)]

    def check_classes(self, num_classes: int) -> None:
        """Raises ValueError if a detector with `num_classes` foreground classes cannot learn these annotations."""
        if self.instances.num_classes > num_classes:
            raise ValueError(
                f"{self.instances.path} has {self.instances.num_classes} categories, but the detector has "
                f"{num_classes} classes; set MODEL.ROI_HEADS.NUM_CLASSES in its config."
            )

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
        flip = bool(generator.random() < self.flip_probability)
        resize = self.resize_rules[int(generator.integers(len(self.resize_rules)))]

        image = self.refer.image(self.expressions[request.texts[0]])
        path = self.images_root / image.file_name
        if self.features is not None:
            example_image, placement = self._precomputed(image, path, resize)
            return Example([example_image], [self._text(index, path, placement) for index in request.texts])
        pixels, placement = read_image(
            path,
            (image.height, image.width),
            resize,
            flip=flip,
            channel_order=self.channel_order,
            name=f"image {image.id}",
        )
        annotations = self.instances.by_image[image.id]
        example_image = ImageExample(
            pixels=pixels,
            original_size=placement.original_size,
            name=str(path),
            boxes=self._candidates(image.id, placement),
            objects=self._objects(annotations, placement) if self.with_objects else None,
        )
        texts = [self._text(index, path, placement) for index in request.texts]
        return Example([example_image], texts)

    def _precomputed(self, image: CocoImage, path: Path, resize: ResizeRule) -> tuple[ImageExample, Placement]:
        """Boxes and features from the file; of the image only the sizes."""
        found = self.features[str(image.id)]
        size = (image.height, image.width)
        if found.image_size != size:
            raise ValueError(
                f"{self.features.path}: image {image.id} was {found.image_size[1]} x {found.image_size[0]} pixels, but "
                f"{self.instances.path} says {image.width} x {image.height}; use features of the same images"
            )
        placement = Placement(size, resize.target_size(*size))
        example = ImageExample(
            pixels=np.broadcast_to(np.uint8(0), (*placement.size, 3)),  # a shape without memory
            original_size=size,
            name=str(path),
            boxes=placement.move_and_clamp_boxes(found.boxes, f"{self.features.path}: image {image.id}"),
            features=found.features,
            image_feature=found.image_feature,
        )
        return example, placement

    def _candidates(self, image_id: int, placement: Placement) -> np.ndarray | None:
        """float32 [R, 4] in pixels of the resized image, clamped; None when the detector proposes."""
        if self.box_source == "online":
            return None
        parts = []
        if self.detections is not None:
            found = self.detections.by_image[image_id]
            boxes = found.boxes
            if self.selection is not None:
                kept = select_regions(torch.from_numpy(found.scores), self.selection)
                boxes = boxes[np.asarray(kept)]
            parts.append(placement.move_and_clamp_boxes(boxes, f"{self.detections.path}: image {image_id}"))
        if self.box_source in ("gt", "detections+gt"):
            boxes = self.instances.boxes(image_id)
            parts.append(placement.move_and_clamp_boxes(boxes, f"{self.instances.path}: image {image_id}"))
        return np.concatenate(parts)

    def _objects(self, annotations: Sequence[CocoAnnotation], placement: Placement) -> Objects:
        single = [annotation for annotation in annotations if not annotation.is_crowd]
        boxes = np.array([annotation.box for annotation in single], dtype=np.float64).reshape(-1, 4)
        classes, attributes = object_labels(single, len(self.instances.attribute_names))
        moved = placement.move_objects(boxes)
        check_boxes(moved, str(self.instances.path), "object")
        return Objects(moved, classes, attributes)

    def _text(self, index: int, path: Path, placement: Placement) -> TextExample:
        expression = self.expressions[index]
        tokens = [] if self.blank_text else self.tokenizer.tokenize(expression.sentence)
        if placement.flipped:
            tokens = [_MIRRORED_WORDS.get(token, token) for token in tokens]
        num_cut = 0
        if self.max_text_length is not None:
            num_cut = max(len(tokens) + 2 - self.max_text_length, 0)
            tokens = tokens[: len(tokens) - num_cut]
        tokens = [self.tokenizer.cls_token, *tokens, self.tokenizer.sep_token]
        box = np.array(self.refer.annotation(expression).box, dtype=np.float64)
        return TextExample(
            input_ids=np.array(self.tokenizer.convert_tokens_to_ids(tokens), dtype=np.int64),
            segment_ids=np.zeros(len(tokens), dtype=np.int64),
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
