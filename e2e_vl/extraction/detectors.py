"""One image in; boxes, scores, classes and features of its regions out, boxes in pixels of the original image.

Shape legend
    R   regions of the image
    D   width of a region feature
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torchvision.ops import nms

from detector.backends import BACKENDS, detector_class
from detector.checkpoint import load_checkpoint
from detector.faster_rcnn import TwoStageDetector
from detector.images import ResizeRule, load_resized, make_image_batch, resize_boxes
from detector.selection import SelectionRule, select_regions
from e2e_vl.config import load_config

CANDIDATES = 2  # detections per wanted region, before those of several classes in one place are merged
RANDOM_WEIGHTS = "The detector's weights are random, so its boxes, classes and features mean nothing."
RANDOM_BOXES = "The run's detector learned to describe given boxes only: those that it finds itself are random."
SAME_PLACE = 0.7  # IoU above which two detections are one region


@dataclasses.dataclass(frozen=True)
class ExtractedRegions:
    """The regions of one image, best score first."""

    boxes: np.ndarray  # float32 [R, 4], xyxy in pixels of the original image, inside it
    scores: np.ndarray  # float32 [R], probability of the class
    classes: np.ndarray  # int64 [R], 0 .. K-1
    features: np.ndarray  # float32 [R, D]
    image: np.ndarray  # uint8 [h, w, 3] RGB, the resized image that the detector saw
    original_size: tuple[int, int]  # (height, width) of the image in the file, after its EXIF rotation

    def __len__(self) -> int:
        return len(self.boxes)

    def save(self, path: Path) -> None:
        """Write a .npz file with `boxes`, `scores`, `classes` and `features`."""
        np.savez(path, boxes=self.boxes, scores=self.scores, classes=self.classes, features=self.features)


@dataclasses.dataclass(frozen=True)
class Extractor:
    """A detector with the image size and the selection rule it is used with."""

    detector: TwoStageDetector
    resize: ResizeRule
    rule: SelectionRule
    backend: str = "builtin"  # name of the detector's class
    warning: str = ""  # for users, where the boxes that it finds mean nothing

    @torch.inference_mode()
    def __call__(self, path: str | Path) -> ExtractedRegions:
        """Find and describe the regions of a JPEG or PNG file.

        Detections that share a place (IoU above 0.7) in several classes are one region of the best class. R is 0 only
        where the detector proposes nothing with an area.

        Raises:
            FileNotFoundError, ValueError: no such image, or not a readable one.
        """
        settings = self.detector.config.input
        pixels, size = load_resized(path, self.resize, settings.format)
        images = make_image_batch([pixels], [size], [str(path)], settings.pixel_mean, settings.pixel_std)
        found = self.detector(images)
        scores = found.scores[0]
        boxes = resize_boxes(found.boxes[0], pixels.shape[:2], size).clamp(min=0)
        boxes = boxes.minimum(boxes.new_tensor([size[1], size[0], size[1], size[0]]))
        has_area = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1).nonzero()[:, 0]
        distinct = has_area[nms(found.boxes[0][has_area], scores[has_area], SAME_PLACE)]
        rows = distinct[select_regions(scores[distinct], self.rule)]
        return ExtractedRegions(
            boxes=boxes[rows].float().numpy(),
            scores=scores[rows].float().numpy(),
            classes=found.classes[0][rows].numpy(),
            features=found.features[0][rows].float().numpy(),
            image=pixels if settings.format == "RGB" else np.ascontiguousarray(pixels[:, :, ::-1]),
            original_size=size,
        )


def build_extractor(
    config: str | Path,
    weights: str | Path | None,
    rule: SelectionRule,
    *,
    backend: str = "builtin",
    resize: ResizeRule | None = None,
    max_proposals: int = 100,
    seed: int = 0,
) -> Extractor:
    """A detector that always finds something: weak detections fill up the rule's `min_regions`.

    Args:
        config: Detectron2 YAML file.
        weights: file or folder of any kind that `load_checkpoint` reads; None = random values, the same for the same
            seed.
        rule: which detections become regions.
        backend: builtin or detectron2.
        resize: size of the network input; None = the config's INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST.
        max_proposals: limit for RPN.POST_NMS_TOPK_TEST, the number of boxes that the RoI head looks at. Time on a CPU
            grows with it; bottom-up attention uses 300, Detectron2 1000.
        seed: of the random values.

    Raises:
        FileNotFoundError, ValueError: a file that is missing or does not fit, no such backend, or no proposals
            allowed.
    """
    if max_proposals < 1:
        raise ValueError(f"The detector needs at least 1 proposal to look at, not {max_proposals} proposals.")
    cls = detector_class(backend)
    settings = cls.config_class.from_yaml(config)
    changes = {
        "MODEL.RPN.POST_NMS_TOPK_TEST": min(settings.rpn.post_nms_topk_test, max_proposals),
        "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
        "TEST.DETECTIONS_PER_IMAGE": CANDIDATES * rule.max_regions,
    }
    settings = cls.config_class.from_flat(settings.to_flat() | changes, str(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        detector = cls(settings).eval()
    if weights is not None:
        load_checkpoint(detector, weights)
    resize = resize or ResizeRule(settings.input.min_size_test, settings.input.max_size_test, "detectron2")
    return Extractor(detector, resize, rule, backend, RANDOM_WEIGHTS if weights is None else "")


def extractor_of_run(
    run_dir: str | Path, rule: SelectionRule, *, backend: str | None = None, max_proposals: int = 100
) -> Extractor:
    """The trained detector of a run directory (or of a saved model folder), with the image size it was evaluated at.

    Args:
        backend: builtin or detectron2; None = that of the run.

    Raises:
        FileNotFoundError: no trained model there.
        ValueError: the run was trained on precomputed features, so that it has no detector.
    """
    folder = Path(run_dir)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / "detector" / "config.yaml").is_file():
        raise FileNotFoundError(f"{run_dir} holds no trained model; give a run directory of tools/train.py.")
    config = load_config(folder / "config.yaml")
    if config.detector.backend not in BACKENDS:
        raise ValueError(
            f"{run_dir}: detector.backend is {config.detector.backend}, so the run has no detector that could look at "
            "images; give --config and --weights."
        )
    resize = config.data.resize
    extractor = build_extractor(
        folder / "detector" / "config.yaml",
        folder / "detector",
        rule,
        backend=backend or config.detector.backend,
        resize=ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding),
        max_proposals=max_proposals,
    )
    return dataclasses.replace(extractor, warning=RANDOM_BOXES if config.detector.proposes_at_random else "")
