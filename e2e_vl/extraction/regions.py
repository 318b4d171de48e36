"""Region extraction: a detector, a rule that selects boxes, and the features of the selected boxes.

Used for single images and in bulk. Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from detector.boxes import best_class_boxes, decode_deltas, is_larger, select_max_conf, select_max_nms, select_regions
from detector.checkpoint import CONFIG_NAME, find_weights, load_checkpoint, read_class_names
from detector.config import BACKENDS, DetectorConfig, SelectionRule
from detector.errors import UserError
from detector.faster_rcnn import TwoStageDetector
from detector.images import ResizeRule, load_resized, make_image_batch, normalise_images, resize_boxes
from detector.operators import batched_nms, clip_boxes_to_image, nms
from detector.roi_pooler import to_rois
from detector.structures import FeatureMaps, ImageBatch, Movable, RoIFeatures, map_tensors
from detector.zoo import PublishedWeights, find_published_weights, read_vocabulary, resolve_weights
from e2e_vl.config import ExtractionConfig, SyntheticDataConfig
from e2e_vl.config_files import find_config, load_config
from e2e_vl.data.features import RegionFeatures
from e2e_vl.data.user_inputs import GivenBoxes, require_inside
from e2e_vl.io import DEMO, find_model_folder
from e2e_vl.registry import DETECTORS
from e2e_vl.samples import AnnotatedObjects, BoxPredictions, ImageBytes
from e2e_vl.transforms import ImageTransform

SAME_PLACE = 0.7  # IoU above which the rule "score" merges two detections
MAX_CANDIDATES = 5000  # most probable (proposal, class) pairs that the rule "score" considers


@dataclasses.dataclass(eq=False)
class InputImage:
    """One image, resized and in the channel order of the network."""

    id: str
    name: str  # for error messages
    pixels: np.ndarray  # uint8 [h, w, 3]
    original_size: tuple[int, int]  # (height, width) of the image in the file, after its EXIF rotation
    given_boxes: GivenBoxes | None = None  # boxes to extract, with the rule "given"
    # float32 [R, 4], the given boxes in pixels of the network input, clamped as in training on the same boxes
    boxes: np.ndarray | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.given_boxes is not None:
            transform = ImageTransform(self.original_size, self.pixels.shape[:2])
            self.boxes = transform.transform_and_clamp_boxes(self.given_boxes.boxes, self.name)


@dataclasses.dataclass
class _SelectedRegions:
    """The boxes of one image that a rule selected, in pixels of the resized image."""

    boxes: Tensor  # float32 [R, 4]
    features: RoIFeatures | None = None  # None: to be pooled from the boxes
    scores: Tensor | None = None  # float [R]; None: the best class probability of the features
    classes: Tensor | None = None  # int64 [R]


@dataclasses.dataclass
class _Candidates(Movable):
    """Detections of one image after the NMS within each class; the few that are left are selected on the CPU."""

    rows: Tensor  # int64 [candidates], their proposals
    classes: Tensor  # int64 [candidates]
    boxes: Tensor  # float32 [candidates, 4], pixels of the resized image
    scores: Tensor  # float32 [candidates]

    def take(self, selected: Tensor) -> _Candidates:
        return map_tensors(self, lambda values: values[selected])


@dataclasses.dataclass
class _RegionValues(Movable):
    """All that is recorded of the regions of one image; they leave a GPU together, so that it waits once."""

    boxes: Tensor
    features: Tensor
    classes: Tensor
    scores: Tensor
    attributes: Tensor | None
    attribute_scores: Tensor | None
    image_feature: Tensor | None


class _Proposals(NamedTuple):
    """The detector's predictions for the proposals of one image."""

    boxes: Tensor  # float32 [P, 4], pixels of the resized image
    features: RoIFeatures
    probs: Tensor  # float32 [P, K], without the background's column
    refined: Tensor  # float32 [P, K, 4], the box of every class, not clipped


class RegionExtractor:
    """Extracts `RegionFeatures` from images, with a detector in evaluation mode on its device."""

    def __init__(self, detector: TwoStageDetector, settings: ExtractionConfig) -> None:
        if settings.attributes and not detector.roi_heads.box_predictor.has_attributes:
            raise UserError("The detector has no attribute head; extract without attributes, or use another config.")
        self.detector = detector
        self.settings = settings

    @torch.no_grad()
    def __call__(self, images: Sequence[InputImage]) -> list[RegionFeatures]:
        """Extract the regions of N images of the same size.

        Returns:
            N records: with the rules "score" and "maxnms" best score first, with "maxconf" in the order of
            `select_max_conf`, with "given" in the given order.
        """
        batch = make_image_batch(
            [image.pixels for image in images],
            [image.original_size for image in images],
            [image.name for image in images],
        ).to(next(self.detector.parameters()).device)
        batch = normalise_images(batch, self.detector.config.input)
        maps = self.detector.features(batch)
        if self.settings.rule == "given":
            selected = [_SelectedRegions(torch.from_numpy(image.boxes).to(batch.pixels.device)) for image in images]
        else:
            selected = []
            for proposals, image in zip(self._propose(maps, batch), images, strict=True):
                selected.append(self._select(proposals, image))
        pooled = self._pool(maps, [regions.boxes for regions in selected])
        for regions, features in zip(selected, pooled, strict=True):
            if regions.features is None:
                regions.features = features
        image_features: list[Tensor | None] = [None] * len(images)
        if self.settings.image_feature:
            corners = batch.sizes.flip(1).to(batch.pixels) - 1  # the last pixel, as in VL-BERT
            boxes = torch.cat((torch.zeros_like(corners), corners), dim=1)[:, None]
            image_features = [features.region[0] for features in self._pool(maps, list(boxes))]
        return [self._record(*parts) for parts in zip(images, selected, image_features, strict=True)]

    def _pool(self, maps: FeatureMaps, boxes: list[Tensor]) -> list[RoIFeatures]:
        pooled = self.detector.describe(maps, to_rois(boxes))
        return list(pooled.split([len(rows) for rows in boxes]))

    def _propose(self, maps: FeatureMaps, batch: ImageBatch) -> list[_Proposals]:
        detector = self.detector
        sizes = [(height, width) for height, width in batch.sizes.tolist()]
        boxes = detector.propose(detector.run_rpn(maps), sizes)
        pooled = detector.describe(maps, to_rois(boxes))
        logits, deltas = detector.roi_heads.box_predictor(pooled.predictor)
        probs = logits.float().softmax(dim=1)[:, :-1]
        refined = decode_deltas(deltas, torch.cat(boxes), detector.config.roi_heads.box_weights)
        refined = refined.unflatten(1, (-1, 4)).expand(-1, probs.shape[1], -1)  # one box may serve all classes
        counts = [len(rows) for rows in boxes]
        split = [tensor.split(counts) for tensor in (pooled, probs, refined)]
        return [_Proposals(*parts) for parts in zip(boxes, *split, strict=True)]

    def _select(self, proposals: _Proposals, image: InputImage) -> _SelectedRegions:
        """Select regions of an image by the rules "score", "maxconf" and "maxnms"."""
        if len(proposals.boxes) == 0:
            empty = proposals.boxes.new_zeros(0)
            return _SelectedRegions(proposals.boxes, proposals.features, empty, empty.long())
        is_final = self.settings.features_of == "final"
        rule = self.settings.rule
        size = image.pixels.shape[:2]
        if rule == "score":
            rows, classes, boxes = self._select_detections(proposals, size)
        else:
            best_boxes, best_scores, best_classes = best_class_boxes(proposals.probs, proposals.refined, size)
            takes_best_boxes = is_final or rule == "maxnms"
            if takes_best_boxes:
                usable = (torch.isfinite(best_boxes).all(dim=1) & is_larger(best_boxes)).nonzero()[:, 0]
            else:
                usable = torch.arange(len(proposals.boxes), device=proposals.boxes.device)
            if rule == "maxnms":
                selected, _ = select_max_nms(best_boxes[usable], best_scores[usable], self.settings.selection_rule)
            else:
                in_original = resize_boxes(proposals.boxes[usable], size, image.original_size)
                selected = select_max_conf(
                    in_original, proposals.probs[usable], self.settings.selection_rule, self.settings.nms_threshold
                )
            rows = usable[selected]
            classes = best_classes[rows]
            boxes = best_boxes[rows] if takes_best_boxes else proposals.boxes[rows]
        features = None  # of the final boxes: not pooled yet
        if not is_final:
            features = proposals.features.apply(lambda values: values[rows])
        return _SelectedRegions(boxes, features, proposals.probs[rows, classes], classes)

    def _select_detections(self, proposals: _Proposals, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Select detections by the rule "score"; returns their proposals' rows, their classes and boxes [R, 4]."""
        probs = proposals.probs
        boxes = clip_boxes_to_image(proposals.refined, size)
        is_usable = torch.isfinite(boxes).all(dim=2) & is_larger(boxes)
        rows, classes = select_candidate_pairs(probs, is_usable)
        boxes = boxes[rows, classes]
        scores = probs[rows, classes]
        selected = batched_nms(boxes, scores, classes, self.detector.config.roi_heads.nms_thresh)
        candidates = _Candidates(rows, classes, boxes, scores).take(selected).cpu()
        selected = nms(candidates.boxes, candidates.scores, SAME_PLACE)
        selected = selected[select_regions(candidates.scores[selected], self.settings.selection_rule)]
        chosen = candidates.take(selected).to(probs.device)
        return chosen.rows, chosen.classes, chosen.boxes

    def _record(self, image: InputImage, regions: _SelectedRegions, image_feature: Tensor | None) -> RegionFeatures:
        predictor = self.detector.roi_heads.box_predictor
        logits = predictor.class_logits(regions.features.predictor)
        scores = regions.scores
        classes = regions.classes
        if scores is None:
            scores, classes = logits.softmax(dim=1)[:, :-1].max(dim=1)
        attributes = None
        attribute_scores = None
        if self.settings.attributes:  # "no attribute" is dropped before the softmax
            attribute_logits = predictor.attributes(regions.features.predictor, logits.argmax(dim=1))[:, :-1]
            attribute_scores, attributes = attribute_logits.softmax(dim=1).max(dim=1)
        box_ids = None
        if image.given_boxes is None:
            boxes = resize_boxes(regions.boxes, image.pixels.shape[:2], image.original_size)
        else:
            boxes = torch.from_numpy(image.given_boxes.boxes)  # not scaled back, which would add rounding errors
            box_ids = image.given_boxes.ids
        values = _RegionValues(
            boxes=clip_boxes_to_image(boxes, image.original_size),
            features=regions.features.region,
            classes=classes,
            scores=scores,
            attributes=attributes,
            attribute_scores=attribute_scores,
            image_feature=image_feature,
        ).cpu()
        return RegionFeatures(
            image_id=image.id,
            image_size=image.original_size,
            boxes=_array(values.boxes),
            features=_array(values.features),
            predictions=BoxPredictions(
                classes=_array(values.classes),
                scores=_array(values.scores),
                attributes=_array(values.attributes),
                attribute_scores=_array(values.attribute_scores),
            ),
            box_ids=box_ids,
            image_feature=_array(values.image_feature),
        )


def _array(values: Tensor | None) -> np.ndarray | None:
    """Convert a tensor to a numpy array; floats become float32."""
    if values is None:
        return None
    if values.is_floating_point():
        values = values.float()
    return values.numpy()


def select_candidate_pairs(probs: Tensor, is_usable: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select candidate detections, (proposal, class) pairs: the most probable ones and each proposal's best class.

    With many classes, a few confident proposals could fill `MAX_CANDIDATES`; the best class of every proposal ensures
    that the rule's minimum number is reached.

    Args:
        is_usable: bool [P, K]; the pairs without it are left out afterwards.

    Returns:
        int64 [pairs] rows of proposals and int64 [pairs] classes, in the order of the rows.
    """
    num_classes = probs.shape[1]
    most_probable = probs.flatten().topk(min(probs.numel(), MAX_CANDIDATES)).indices
    best_class = torch.arange(len(probs), device=probs.device) * num_classes + probs.argmax(dim=1)
    is_candidate = torch.zeros_like(probs, dtype=torch.bool)
    is_candidate.view(-1)[torch.cat((most_probable, best_class))] = True
    if is_usable is not None:
        is_candidate &= is_usable
    return is_candidate.nonzero(as_tuple=True)


# The detector: a config with weights, or the detector of a trained run


RANDOM_WEIGHTS = "The detector's weights are random, so its boxes, classes and features are meaningless."
RANDOM_BOXES = "The run's detector was trained on given boxes only: its predicted boxes are random."


@dataclasses.dataclass(frozen=True)
class LoadedDetector:
    """A detector in evaluation mode, with its image size and origin."""

    detector: TwoStageDetector
    resize: ResizeRule
    backend: str = "builtin"  # name of the detector's class
    weights: Path | None = None  # the loaded file; None = random weights
    seed: int = 0  # of random weights
    attribute_names: tuple[str, ...] | None = None  # A names; None: attributes are not predicted
    warning: str = ""  # for users, if the predicted boxes are random
    # the images of its training, if they were drawn
    drawn_scenes: SyntheticDataConfig = dataclasses.field(default_factory=SyntheticDataConfig)


def open_detector(
    config: str | Path,
    weights: str | Path | None,
    *,
    backend: str | None = None,
    resize: ResizeRule | None = None,
    rounding: str = "detectron2",
    max_proposals: int | None = None,
    seed: int = 0,
    class_names: str | Path | None = None,
    attribute_names: str | Path | None = None,
) -> LoadedDetector:
    """Build a detector from its config and load its weights.

    Args:
        weights: file or folder of any kind that `load_checkpoint` reads; None = random values, from the seed only.
        backend: builtin (None) or detectron2.
        resize: size of the network input; None = the config's INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST, with `rounding`.
        max_proposals: upper limit for RPN.POST_NMS_TOPK_TEST, the number of proposals that reach the RoI head; None =
            the config's number. Time on a CPU grows with it; bottom-up attention uses 300, Detectron2 1000.
        class_names: text file of the class names, see `read_vocabulary`; None = those of the weights, if they have any.
        attribute_names: likewise; None = attributes are not predicted.
    """
    backend = backend or "builtin"
    cls = DETECTORS[backend].cls
    settings = DetectorConfig.from_yaml(find_config(config))
    if weights is not None:
        weights = find_weights(weights)  # before the network is built, which takes seconds
    if max_proposals is not None:
        changes = {"MODEL.RPN.POST_NMS_TOPK_TEST": min(settings.rpn.post_nms_topk_test, max_proposals)}
        settings = DetectorConfig.from_flat(settings.to_flat() | changes, str(config))
    names = None
    if class_names is not None:
        names = read_vocabulary(class_names, settings.roi_heads.num_classes, "classes")
    elif weights is not None:
        names = read_class_names(weights, settings.roi_heads.num_classes)
    names_of_attributes = None
    if attribute_names is not None:
        names_of_attributes = read_vocabulary(attribute_names, settings.attributes.num_classes, "attributes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        detector = cls(settings, class_names=names).eval()
    warning = RANDOM_WEIGHTS
    if weights is not None:
        load_checkpoint(detector, weights)
        warning = ""
    resize = resize or ResizeRule(settings.input.min_size_test, settings.input.max_size_test, rounding)
    return LoadedDetector(
        detector, resize, backend, weights, seed, attribute_names=names_of_attributes, warning=warning
    )


def find_detector(
    source: str | Path,
    config: str | Path | None = None,
    *,
    backend: str | None = None,
    max_proposals: int | None = None,
    class_names: str | Path | None = None,
    attribute_names: str | Path | None = None,
) -> LoadedDetector:
    """Load a detector by name or path.

    Args:
        source: the name of published weights, see `detector.zoo`; a run directory or saved model folder; a
            folder with `config.yaml` and `model.safetensors`; or any weights file that `load_checkpoint` reads.
        config: Detectron2 YAML file, see `find_config`; needed for a file without one.
        backend, max_proposals, class_names, attribute_names: as in `open_detector`; for a run, the backend defaults to
            the run's.
    """
    if not isinstance(source, str | os.PathLike):
        raise UserError(f"A detector is loaded by a name or a path, not by a {type(source).__name__}.")
    if Path(source) == Path("demo") and not Path(source).exists():
        source = DEMO
    weights = resolve_weights(source)
    published = None
    rounding = "detectron2"
    if isinstance(weights, PublishedWeights):
        published = weights
        weights = published.name
    elif config is None:
        if weights.is_file():  # a copy of a published file, with its name
            published = find_published_weights(weights)
        elif (weights / "model").is_dir() or (weights / "detector").is_dir():
            return detector_of_run(
                weights,
                backend=backend,
                max_proposals=max_proposals,
                class_names=class_names,
                attribute_names=attribute_names,
            )
        elif (weights / CONFIG_NAME).is_file():
            config = weights / CONFIG_NAME
    if published is not None:
        if published.expect == "backbone":
            raise UserError(
                f"{published.name} is a backbone trained on ImageNet, not a detector; give a detector, or train from "
                "this backbone with detector.weights and detector.expect=backbone."
            )
        config = config or published.config_path
        rounding = published.rounding
    if config is None:
        find_weights(weights)  # raises an error if the file is missing
        raise UserError(f"{weights}: there is no config beside the weights; give the detector's Detectron2 YAML file.")
    return open_detector(
        config,
        weights,
        backend=backend,
        rounding=rounding,
        max_proposals=max_proposals,
        class_names=class_names,
        attribute_names=attribute_names,
    )


def detector_of_run(
    run_dir: str | Path,
    *,
    backend: str | None = None,
    max_proposals: int | None = None,
    class_names: str | Path | None = None,
    attribute_names: str | Path | None = None,
) -> LoadedDetector:
    """Load the trained detector of a run directory or saved model, with the image size of the run's evaluation.

    For the arguments, see `find_detector`.
    """
    folder = find_model_folder(Path(run_dir))
    config = load_config(folder / "config.yaml")
    if config.detector.backend not in BACKENDS:
        raise UserError(
            f"{run_dir}: detector.backend is {config.detector.backend}, which sees no image; give --config, --weights"
        )
    resize = config.data.resize
    loaded = open_detector(
        folder / "detector" / "config.yaml",
        folder / "detector",
        backend=backend or config.detector.backend,
        resize=ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding, resize.library),
        max_proposals=max_proposals,
        class_names=class_names,
        attribute_names=attribute_names,
    )
    warning = RANDOM_BOXES if config.detector.proposes_at_random else ""
    return dataclasses.replace(loaded, warning=warning, drawn_scenes=config.data.synthetic)


def extract_image(
    image: str | Path | ImageBytes, source: LoadedDetector, rule: SelectionRule, objects: AnnotatedObjects | None = None
) -> RegionFeatures:
    """Extract the regions of one image by the rule "score", best score first, or those of `objects` in their order.

    This is bulk extraction with a batch of one. Attributes are predicted if the source has names for them. The features
    are of the proposals or of the final boxes, according to the config's MODEL.ROI_HEADS.FEATURES_OF.
    """
    config = source.detector.config
    content = image.content if isinstance(image, ImageBytes) else image
    name = str(image)
    pixels, size = load_resized(content, source.resize, config.input.format, name)
    attributes = source.attribute_names is not None
    if objects is None:
        settings = ExtractionConfig("score", rule, config.roi_heads.features_of, attributes)
        boxes = None
    else:
        require_inside(objects.boxes, size, objects.origin, name)
        settings = ExtractionConfig("given", attributes=attributes)
        boxes = GivenBoxes(np.asarray(objects.boxes, dtype=np.float64), np.arange(len(objects)))
    [regions] = RegionExtractor(source.detector, settings)([InputImage(Path(name).stem, name, pixels, size, boxes)])
    return regions
