"""Load the pixels and candidate boxes of a `SampleImage` at the network's input size, for any data set.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from detector.boxes import check_boxes, select_regions
from detector.config import SelectionRule
from detector.errors import UserError
from detector.images import ResizeRule, load_resized
from detector.io import read_json
from e2e_vl.config import BoxSource, DataConfig
from e2e_vl.data.base import VLDataset, open_options
from e2e_vl.data.box_checks import require_pixels, warn_of_boxes_outside
from e2e_vl.data.features import FeatureStore, open_features
from e2e_vl.data.tables import SkippedRecords
from e2e_vl.io import FourNumbers, Id, Record, Score, box_corners
from e2e_vl.samples import (
    AnnotatedObjects,
    BoxPredictions,
    BrokenImageError,
    CandidateBoxes,
    ImageBytes,
    ImageKey,
    SampleImage,
)
from e2e_vl.transforms import DetectionObjects, ImageTransform, LoadedImage

logger = logging.getLogger(__name__)

# Files of candidate boxes: detections in the format of MAttNet or of COCO's results, and region features


class BoxReader(abc.ABC):
    """Candidate boxes by image id, from one or several files; the first file that contains an image is used."""

    files: Sequence[Path]

    def of_split(self, split_index: int) -> BoxReader:
        """Return the reader of one of the joined splits, see `ImageKey`."""
        return self

    @abc.abstractmethod
    def __contains__(self, image_id: str) -> bool:
        """Return whether any file contains the image."""

    @abc.abstractmethod
    def read(self, image_id: str) -> CandidateBoxes:
        """Read the boxes of an image."""

    def contents(self) -> Iterable[np.ndarray | list[str] | dict[str, Any] | None]:
        """Yield what was read when the files were opened, for `tables.fingerprint`."""
        return ()

    def require_images(self, images: Iterable[ImageKey], split: str) -> None:
        """Raise a UserError if images of the split are missing."""
        missing = [key for key in images if key.id not in self.of_split(key.split_index)]
        if missing:
            more = f" (and {len(missing) - 1} more images)" if len(missing) > 1 else ""
            files = self.of_split(missing[0].split_index).files
            raise UserError(
                f"{', '.join(map(str, files))}: no boxes for image {missing[0].id}{more} of the split {split}; use "
                "the file of this data set, extract the features, or choose another box source (gt or online)"
            )


class BoxesOfSplits(BoxReader):
    """Candidate boxes of joined splits with files of their own: an image is read from the file of its split."""

    def __init__(self, readers: Sequence[BoxReader]) -> None:
        self.readers = readers
        files = itertools.chain.from_iterable(reader.files for reader in readers)
        self.files = list(dict.fromkeys(files))

    @override
    def of_split(self, split_index: int) -> BoxReader:
        return self.readers[split_index]

    @override
    def contents(self) -> Iterable[np.ndarray | list[str] | dict[str, Any] | None]:
        for reader in dict.fromkeys(self.readers):
            yield from reader.contents()

    def __contains__(self, image_id: str) -> bool:
        return any(image_id in reader for reader in self.readers)

    @override
    def read(self, image_id: str) -> CandidateBoxes:
        """Read the boxes of an image whose id only one of the splits uses."""
        readers = [reader for reader in dict.fromkeys(self.readers) if image_id in reader]
        if len(readers) > 1:
            raise UserError(
                f"{', '.join(map(str, self.files))}: image {image_id} is in several files; read it with `of_split`"
            )
        return (readers or self.readers)[0].read(image_id)


class _Detection(Record):
    image_id: Id
    score: Score
    box: FourNumbers | None = None  # MAttNet's: x, y, width, height
    bbox: FourNumbers | None = None  # the same in COCO's results
    category_name: str | None = None
    phrase: str | None = None  # that the detector looked for


class ImageDetections(NamedTuple):
    """The detections of one image, in file order."""

    boxes: np.ndarray  # float64 [R, 4]
    scores: np.ndarray  # float32 [R]
    phrases: tuple[str, ...]  # R phrases or class names; "": the file has none


def read_detections(path: Path) -> dict[str, ImageDetections]:
    """Read the detections of each image in MAttNet's `*_dets.json`, or in a file of COCO's results.

    The file is an unsorted list of {`image_id`, `box` or `bbox` [x, y, w, h], `score`, ...}, perhaps with a `phrase` or
    a `category_name`. Boxes with a side of 0 are skipped, and their number is logged; a negative side is an error.
    """
    boxes: dict[str, list[FourNumbers]] = defaultdict(list)
    scores: dict[str, list[float]] = defaultdict(list)
    phrases: dict[str, list[str]] = defaultdict(list)
    skipped = SkippedRecords(path)
    for number, detection in enumerate(read_json(path, list[_Detection])):
        image_id = str(detection.image_id)
        sides = detection.box or detection.bbox
        if sides is None:
            raise UserError(f"{path}: detection {number} has no bbox, [x, y, width, height]; correct or remove it.")
        if 0 in sides[2:]:
            skipped.add("detections with an empty box", number)
            continue
        boxes[image_id].append(box_corners(sides, f"{path}: detection {number}"))
        scores[image_id].append(detection.score)
        phrases[image_id].append(detection.phrase or detection.category_name or "")
    skipped.log()
    if boxes:
        require_pixels(np.concatenate(list(boxes.values())), str(path))
    detections = {}
    for image_id, corners in boxes.items():
        box_scores = np.array(scores[image_id], dtype=np.float32)
        box_corners_of_image = np.array(corners, dtype=np.float64)
        detections[image_id] = ImageDetections(box_corners_of_image, box_scores, tuple(phrases[image_id]))
    return detections


class DetectedBoxes(BoxReader):
    """Selected boxes from files of detections, by descending score."""

    def __init__(self, files: Sequence[Path], selection: SelectionRule) -> None:
        self.files = files
        self.selection = selection
        self._detections: dict[str, tuple[Path, ImageDetections]] = {}
        for path in files:
            for image_id, detections in read_detections(path).items():
                self._detections.setdefault(image_id, (path, detections))

    @override
    def contents(self) -> Iterable[np.ndarray | list[str]]:
        yield list(self._detections)
        for _, detections in self._detections.values():
            yield detections.boxes
            yield detections.scores

    def __contains__(self, image_id: str) -> bool:
        return image_id in self._detections

    @override
    def read(self, image_id: str) -> CandidateBoxes:
        self.require_images([ImageKey(0, image_id)], "data")
        path, detections = self._detections[image_id]
        rows = select_regions(detections.scores, self.selection).numpy()
        return CandidateBoxes(
            detections.boxes[rows],
            f"{path}: image {image_id}",
            predictions=BoxPredictions(scores=detections.scores[rows]),
            phrases=tuple(detections.phrases[row] for row in rows),
        )

    def warn_of_boxes_outside(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Log a warning if many boxes exceed their images, such as corners in place of width and height.

        Args:
            sizes: (height, width) of the images to compare with, by image id.
        """
        image_ids = [image_id for image_id in sizes if image_id in self]
        if not image_ids:
            return
        boxes = [self._detections[image_id][1].boxes for image_id in image_ids]
        counts = [len(rows) for rows in boxes]
        image_sizes = [sizes[image_id][::-1] for image_id in image_ids]
        first_path = self._detections[image_ids[0]][0]
        warn_of_boxes_outside(
            np.concatenate(boxes),
            np.repeat(image_sizes, counts, axis=0),
            np.repeat(image_ids, counts),
            str(first_path),
        )


@dataclasses.dataclass(eq=False)  # a reader is equal to itself only, and hashable
class StoredBoxes(BoxReader):
    """Boxes from files of region features: by descending score, or in stored order if they have no scores."""

    stores: Sequence[FeatureStore]
    selection: SelectionRule  # of boxes with scores
    _: dataclasses.KW_ONLY
    with_features: bool  # also return the features, which replace the detector, for the first `limit` boxes
    limit: int | None = None  # None: all boxes

    def __post_init__(self) -> None:
        self.files = [store.path for store in self.stores]

    @override
    def contents(self) -> Iterable[dict[str, Any] | None]:
        """Yield how the features were extracted; reading all of them would take long."""
        return (store.stamp for store in self.stores)

    def __contains__(self, image_id: str) -> bool:
        return any(image_id in store for store in self.stores)

    @override
    def read(self, image_id: str) -> CandidateBoxes:
        store = next((store for store in self.stores if image_id in store), self.stores[0])
        regions = store[image_id]
        scores = regions.predictions.scores
        is_detected = scores is not None and regions.box_ids is None
        if is_detected and self.with_features:
            rows = np.argsort(-scores, kind="stable")[: self.limit]
        elif is_detected:
            rows = select_regions(scores, self.selection).numpy()
        elif self.with_features:
            rows = slice(self.limit)
        else:
            rows = slice(None)
        features = None
        image_feature = None
        if self.with_features:
            features = regions.features[rows]
            image_feature = regions.image_feature
        return CandidateBoxes(
            regions.boxes[rows],
            f"{store.path}: image {image_id}",
            image_size=regions.image_size,
            features=features,
            image_feature=image_feature,
            predictions=regions.predictions.select(rows),
        )


def open_boxes(
    files: Sequence[Path], selection: SelectionRule, *, with_features: bool, limit: int | None = None
) -> BoxReader:
    """Open box files of one format: `.json` has detections, all others are region features; see `StoredBoxes`."""
    if files[0].suffix.lower() != ".json":
        stores = [open_features(path) for path in files]
        return StoredBoxes(stores, selection, with_features=with_features, limit=limit)
    if with_features:
        raise UserError(f"{files[0]}: detections have no features; use a file of region features")
    return DetectedBoxes(files, selection)


def open_boxes_of(dataset: VLDataset, settings: DataConfig, boxes: BoxSource) -> BoxReader | None:
    """Open the box or feature files of a split; None if the source reads no file or the samples contain the boxes."""
    key = next((key for key in boxes.needs if key != "instances"), None)
    if key is None or not dataset.split_values:
        return None
    data_files, _ = open_options(type(dataset), settings)
    files = [data_files.path(key, **values) for values in dataset.split_values]
    if any("{split}" in data_files.name(key, **values) for values in dataset.split_values):
        raise UserError(
            f"data.files.{key}: {type(dataset).__name__} does not say what {{split}} stands for; set its split_values, "
            "or name one file for all splits."
        )
    with_features = boxes is BoxSource.PRECOMPUTED
    limit = settings.boxes.max_precomputed if with_features else None
    readers = {}
    for file in dict.fromkeys(files):
        readers[file] = open_boxes([file], settings.boxes.selection, with_features=with_features, limit=limit)
    if any(isinstance(reader, DetectedBoxes) for reader in readers.values()):
        sizes = _some_image_sizes(dataset)
        for file, reader in readers.items():
            if isinstance(reader, DetectedBoxes):
                sizes_of_file = {key.id: size for key, size in sizes.items() if files[key.split_index] == file}
                reader.warn_of_boxes_outside(sizes_of_file)
    if len(readers) == 1:
        return readers[files[0]]
    return BoxesOfSplits([readers[file] for file in files])


_IMAGES_COMPARED = 200  # with the boxes of a file of detections, which has no image sizes


def _some_image_sizes(dataset: VLDataset) -> dict[ImageKey, tuple[int, int]]:
    """Return the annotated (height, width) of evenly spaced images of a split."""
    sizes: dict[ImageKey, tuple[int, int]] = {}
    num_groups = len(dataset.groups)
    for row in range(0, num_groups, max(num_groups // _IMAGES_COMPARED, 1)):
        texts = dataset.groups[row][:1]
        if not len(texts):
            continue
        with contextlib.suppress(UserError):  # a damaged record is reported when it is loaded
            for image in dataset.sample(texts).images:
                if image.size is not None:
                    sizes[image.key] = image.size
    return sizes


# Object outlines as small masks on the RoI grid, as in the official code for VCR


_AT_POINT = 1e-12  # a grid point this close to a corner of the outline counts as the corner (scikit-image)


def instance_mask(outlines: Sequence[np.ndarray], box: np.ndarray, side: int = 14, at: str = "corners") -> np.ndarray:
    """Rasterise an object's outlines on the S x S grid of its box.

    At "centres" (R2C, VisualBERT): a cell is 1 if its centre is inside any outline, by the even-odd rule.

    At "corners" (official VL-BERT code): coordinates relative to the box are scaled by S / (width + 1) and
    S / (height + 1) and clamped to [0, S - 1]; grid points (column, row) = 0 .. S - 1 inside or on an outline are 1, as
    in `skimage.draw.polygon`. The mask is slightly narrower than the object, because points are tested, not cells.

    Args:
        outlines: float [points, 2] (x, y) each, in the pixels of `box` [4] xyxy.
        at: which point of each grid cell is tested, "corners" or "centres".

    Returns:
        float32 [S, S] of 0 and 1; all 0 if there is no outline.
    """
    mask = np.zeros((side, side), dtype=np.float32)
    x1, y1, x2, y2 = map(float, box)
    if at == "centres":
        from matplotlib.path import Path as Outline  # slow to import

        cell_centres = (np.arange(side) + 0.5) / side  # as shares of the box
        columns = x1 + (x2 - x1) * cell_centres
        rows = y1 + (y2 - y1) * cell_centres
        grid = np.stack(np.meshgrid(columns, rows), axis=-1)
        for outline in outlines:
            is_inside = Outline(outline, closed=False).contains_points(grid.reshape(-1, 2))
            mask[is_inside.reshape(side, side)] = 1
        return mask
    # float32 as in the official code: rounding affects grid points on an outline
    origin = np.array([x1, y1], dtype=np.float32)
    ratio = np.array([side / (x2 - x1 + 1), side / (y2 - y1 + 1)], dtype=np.float32)
    for outline in outlines:
        points = (outline.astype(np.float32) - origin) * ratio
        points = points.clip(0, side - 1).astype(np.float64)
        mask[_covers(points, side)] = 1
    return mask


def _covers(points: np.ndarray, side: int) -> np.ndarray:
    """Return which grid points are in or on a closed outline [points, 2]: bool [S, S] (O'Rourke's crossing rule)."""
    rows, columns = np.mgrid[:side, :side]
    grid = np.stack([columns, rows], axis=-1).astype(np.float64)
    end = points - grid[..., None, :]  # [S, S, points, 2]
    start = np.roll(end, 1, axis=2)
    x0, y0 = np.moveaxis(start, -1, 0)
    x1, y1 = np.moveaxis(end, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = (x1 * y0 - x0 * y1) / (y0 - y1)
    to_right = (((y0 > 0) != (y1 > 0)) & (crossing > 0)).sum(axis=2) % 2 == 1
    to_left = (((y0 < 0) != (y1 < 0)) & (crossing < 0)).sum(axis=2) % 2 == 1
    is_corner = (np.abs(end) < _AT_POINT).all(axis=-1).any(axis=2)
    return is_corner | to_right | (to_right != to_left)


MEAN_COLOUR = {"RGB": (123, 116, 103), "BGR": (103, 116, 123)}  # mean of natural images, as subtracted by detectors


@dataclasses.dataclass(frozen=True)
class ImageRules:
    """How images are preprocessed."""

    resize: tuple[ResizeRule, ...]  # of the network input; one is sampled per request (multi-scale training)
    flip_probability: float = 0.0  # of a horizontal flip; for training
    channel_order: str = "BGR"  # or "RGB"
    with_objects: bool = False  # add the annotated objects, without crowds, as targets for the detection losses
    mask_size: int | None = None  # S, the size of the instance masks of the candidate boxes; None: no masks
    mask_at: str = "corners"  # see `instance_mask`
    # if an image has no outlines, use masks of ones; for data where other images have outlines
    fill_masks: bool = False
    # the control without images: all pixels have the mean colour, saved features are zero, instance masks are one
    is_blank: bool = False
    # with `is_blank`, also remove the candidate boxes: their number and positions may reveal the answer
    blank_boxes: bool = False
    # flip the boxes of saved features although the features are of the unflipped image (official VL-BERT code); False
    # forbids flips with saved features
    mirror_precomputed: bool = False
    # if the file has no feature of the whole image, use the mean over the regions (official VL-BERT code)
    mean_image_feature: bool = False


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """The random choices for one request."""

    flip: bool
    resize: ResizeRule


_UNKNOWN_SIZE = (10**6, 10**6)  # of an image that is not opened; larger than any, so that no box lies outside


class ImageLoader:
    """Reads images and their candidate boxes.

    Args:
        source: of the candidate boxes; boxes in the sample take precedence.
        box_reader: for the sources that need files.
    """

    def __init__(self, rules: ImageRules, source: BoxSource, box_reader: BoxReader | None = None) -> None:
        if source is BoxSource.PRECOMPUTED and rules.flip_probability > 0 and not rules.mirror_precomputed:
            raise UserError("Precomputed features do not allow flips; set data.flip to 0")
        self.rules = rules
        self.source = source
        self.box_reader = box_reader
        self._warned_of_empty_mask = False

    def require_images(self, images: Iterable[ImageKey], split: str) -> None:
        """Raise a UserError if the files of boxes lack images of the split."""
        if self.box_reader is not None:
            self.box_reader.require_images(images, split)

    def draw_augmentation(self, generator: np.random.Generator) -> Augmentation:
        """Draw whether to flip the images of a request, and the size that they are resized to."""
        flip = bool(generator.random() < self.rules.flip_probability)
        number = int(generator.integers(len(self.rules.resize)))
        return Augmentation(flip, self.rules.resize[number])

    def load(self, image: SampleImage, augmentation: Augmentation, *, blank_if_broken: bool = False) -> LoadedImage:
        """Load the pixels (or saved features) of an image, with its candidate boxes.

        Args:
            blank_if_broken: an image that is missing or cannot be read has the mean colour everywhere, if its size is
                known (official VL-BERT pre-training).

        Raises:
            BrokenImageError: the image is missing or cannot be read; the cause names the image and the path.
            UserError: its size differs from its annotations, a box lies outside it, or required boxes or objects are
                missing.
        """
        candidates = self._candidates(image)
        if candidates is not None and candidates.features is not None:
            example = self._precomputed(image, candidates, augmentation)
        else:
            example = self._read(image, candidates, augmentation, blank_if_broken=blank_if_broken)
        if self.rules.is_blank and self.rules.blank_boxes:
            return example.without_boxes()
        return example

    def load_without_pixels(self, image: SampleImage, size: tuple[int, int] | None) -> LoadedImage:
        """Return what `load` returns, with the same checks, but do not open the image: its pixels are all 0.

        Args:
            size: (height, width) of the image in its file; None: that of its annotations. Where neither is known, no
                box lies outside.
        """
        candidates = self._candidates(image)
        augmentation = Augmentation(False, self.rules.resize[0])
        if candidates is not None and candidates.features is not None:
            return self._precomputed(image, candidates, augmentation)
        name = str(image.file) if isinstance(image.file, Path | ImageBytes) else f"image {image.id}"
        annotated_size = self._annotated_size(image, candidates)
        if size is None:
            size = annotated_size or _UNKNOWN_SIZE
        self._check_size(image, name, size, annotated_size)
        image_transform = ImageTransform(tuple(size), augmentation.resize.target_size(*size))
        pixels = np.broadcast_to(np.uint8(0), (*image_transform.size, 3))  # has a shape but takes no memory
        return self._add_annotations(LoadedImage(pixels, image_transform, name), image, candidates)

    def _candidates(self, image: SampleImage) -> CandidateBoxes | None:
        """Return the candidate boxes of the sample or of a file, checked against the annotations, or None."""
        candidates = image.boxes
        if candidates is None and self.box_reader is not None:
            candidates = self.box_reader.of_split(image.split_index).read(image.id)
        self._check_annotations(image, candidates)
        return candidates

    def _read(
        self,
        image: SampleImage,
        candidates: CandidateBoxes | None,
        augmentation: Augmentation,
        *,
        blank_if_broken: bool = False,
    ) -> LoadedImage:
        """Load the pixels of an image; arguments as in `load`."""
        rules = self.rules
        annotated_size = self._annotated_size(image, candidates)
        is_blank = rules.is_blank
        name = image.id
        try:
            file = image.locate()
            if isinstance(file, ImageBytes):
                content = file.content
                name = file.name
            else:
                content = file
                name = str(file)
            size = None if annotated_size is None else tuple(annotated_size)
            pixels, size = load_resized(content, augmentation.resize, rules.channel_order, name, size)
        except (ValueError, OSError) as error:
            if not blank_if_broken or annotated_size is None:
                raise BrokenImageError from error
            is_blank = True
            size = tuple(annotated_size)
            pixels = np.zeros((*augmentation.resize.target_size(*size), 3), dtype=np.uint8)
        self._check_size(image, name, size, annotated_size)
        if augmentation.flip:
            pixels = np.ascontiguousarray(pixels[:, ::-1])
        image_transform = ImageTransform(size, pixels.shape[:2], augmentation.flip)
        if is_blank:
            pixels = np.broadcast_to(np.array(MEAN_COLOUR[rules.channel_order], dtype=np.uint8), pixels.shape)
        return self._add_annotations(LoadedImage(pixels, image_transform, name), image, candidates)

    def _add_annotations(
        self, example: LoadedImage, image: SampleImage, candidates: CandidateBoxes | None
    ) -> LoadedImage:
        """Add candidate boxes, boxes to mask and annotated objects, as far as they are needed; return the example."""
        image_transform = example.image_transform
        self._add_candidates(example, image, candidates)
        if image.boxes_to_mask is not None:
            example.boxes_to_mask = image_transform.transform_and_clamp_boxes(image.boxes_to_mask, "boxes to mask")
        if self.rules.with_objects:
            example.objects = self._objects(image.objects, image_transform)
        return example

    def _annotated_size(self, image: SampleImage, candidates: CandidateBoxes | None) -> tuple[int, int] | None:
        """Return (height, width) of the image according to its box file or its annotations; None if neither says it."""
        if candidates is not None and candidates.image_size is not None:
            return candidates.image_size
        return image.size

    def _check_size(
        self, image: SampleImage, name: str, size: tuple[int, int], annotated_size: tuple[int, int] | None
    ) -> None:
        """Raise a UserError if the size of the image's file differs from the annotated one."""
        if annotated_size is not None and tuple(size) != tuple(annotated_size):
            is_turned = tuple(size) == tuple(annotated_size)[::-1]
            hint = "; it was rotated afterwards, or has lost its EXIF orientation" if is_turned else ""
            raise UserError(
                f"{name}: image {image.id} is {size[1]} x {size[0]} pixels, but "
                f"{annotated_size[1]} x {annotated_size[0]} in its annotation file{hint}; use the annotated images"
            )

    def _check_annotations(self, image: SampleImage, candidates: CandidateBoxes | None) -> None:
        """Check that required boxes and objects exist, and that box file and annotations have the same image size."""
        if candidates is None and self.source not in (BoxSource.GT, BoxSource.ONLINE):
            raise UserError(f"image {image.id} has no boxes '{self.source}'; set data.files.{self.source.needs[-1]}")
        needs_candidates = image.boxes is None and self.source.reads_annotations
        if image.objects is None and (needs_candidates or self.rules.with_objects):
            purpose = f"boxes '{self.source}'" if needs_candidates else "the targets of the detection losses"
            raise UserError(
                f"image {image.id}: {purpose} need annotated objects; set an instances file (data.files.instances)"
            )
        boxes_size = None if candidates is None else candidates.image_size
        if None not in (image.size, boxes_size) and image.size != boxes_size:
            is_rotated = image.size == boxes_size[::-1]
            remedy = "use features of the same images"
            if is_rotated:
                remedy = (
                    "one size is before its EXIF rotation and one after it; extract the features with the annotation "
                    "file as --images, or annotate the upright image"
                )
            raise UserError(
                f"{candidates.origin}: the image was {boxes_size[1]} x {boxes_size[0]} pixels, but "
                f"{image.size[1]} x {image.size[0]} in its annotations; {remedy}"
            )

    def _precomputed(self, image: SampleImage, candidates: CandidateBoxes, augmentation: Augmentation) -> LoadedImage:
        """Make an example of boxes and features from a file, with the sizes of the image but without its pixels."""
        size = candidates.image_size
        image_transform = ImageTransform(size, augmentation.resize.target_size(*size), augmentation.flip)
        features = candidates.features
        image_feature = candidates.image_feature
        if image_feature is None and self.rules.mean_image_feature:
            image_feature = np.zeros(features.shape[1], dtype=np.float32)
            if len(features):
                image_feature = features.mean(axis=0)
        if self.rules.is_blank:
            features = np.zeros_like(features)
            if image_feature is not None:
                image_feature = np.zeros_like(image_feature)
        name = str(image.file) if isinstance(image.file, Path) else candidates.origin
        return LoadedImage(
            pixels=np.broadcast_to(np.uint8(0), (*image_transform.size, 3)),  # has a shape but takes no memory
            image_transform=image_transform,
            name=name,
            boxes=image_transform.transform_and_clamp_boxes(candidates.boxes, candidates.origin),
            class_probs=candidates.class_probs,
            features=features,
            image_feature=image_feature,
            predictions=candidates.predictions,
        )

    def _add_candidates(self, example: LoadedImage, image: SampleImage, candidates: CandidateBoxes | None) -> None:
        """Add boxes from a file or the sample, and annotated boxes, depending on the source; boxes are clamped."""
        parts = []
        if candidates is not None:
            parts.append(example.image_transform.transform_and_clamp_boxes(candidates.boxes, candidates.origin))
            example.class_probs = candidates.class_probs
        if image.boxes is None and self.source.reads_annotations:
            rows = range(len(image.objects)) if image.candidates is None else image.candidates
            parts.append(self._add_annotated(example, image, list(rows), are_only_boxes=candidates is None))
        if parts:
            example.boxes = np.concatenate(parts)
        if candidates is not None and len(parts) == 1:  # annotated boxes have no predictions
            example.predictions = candidates.predictions
            example.phrases = candidates.phrases

    def _add_annotated(
        self, example: LoadedImage, image: SampleImage, rows: Sequence[int], *, are_only_boxes: bool
    ) -> np.ndarray:
        """Return annotated objects as candidate boxes; add their ids, classes and masks if there are no other boxes."""
        objects = image.objects
        image_transform = example.image_transform
        if are_only_boxes:
            example.box_ids = None if objects.ids is None else tuple(objects.ids[row] for row in rows)
            example.box_classes = None if objects.classes is None else objects.classes[rows]
            if self.rules.mask_size is not None and (objects.outlines is not None or self.rules.fill_masks):
                example.roi_masks = self._masks(image, rows, image_transform)
        return image_transform.transform_and_clamp_boxes(objects.boxes[rows], objects.origin)

    def _masks(self, image: SampleImage, rows: Sequence[int], image_transform: ImageTransform) -> np.ndarray:
        """Return the instance masks, float32 [R, S, S]; that of an object without outlines is its whole box."""
        side = self.rules.mask_size
        objects = image.objects
        if objects.outlines is None or self.rules.is_blank:  # outlines would reveal shapes
            return np.ones((len(rows), side, side), dtype=np.float32)
        mask_at = self.rules.mask_at
        masks = [instance_mask(objects.outlines[row], objects.boxes[row], side, mask_at) for row in rows]
        masks = np.array(masks, dtype=np.float32).reshape(-1, side, side)
        is_empty = ~masks.any(axis=(1, 2))
        if is_empty.any() and not self._warned_of_empty_mask:
            self._warned_of_empty_mask = True
            logger.warning(
                "%s: the outline of object %d covers no point of its mask, so its feature is zero; further such "
                "objects are not logged. Set task.config.mask_size=null to use no masks.",
                objects.origin,
                rows[int(is_empty.argmax())],
            )
        if image_transform.flipped:
            return np.ascontiguousarray(masks[:, :, ::-1])
        return masks

    def _objects(self, objects: AnnotatedObjects, image_transform: ImageTransform) -> DetectionObjects:
        """Return the annotated objects, without crowds, as targets for the detection losses."""
        rows = np.arange(len(objects))
        if objects.is_crowd is not None:
            rows = np.flatnonzero(~objects.is_crowd)
        boxes = image_transform.transform_objects(objects.boxes[rows])
        check_boxes([boxes], [objects.origin], "object")
        attributes = None if objects.attributes is None else objects.attributes[rows]
        return DetectionObjects(boxes, objects.classes[rows], attributes)
