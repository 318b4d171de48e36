"""The public detector API: regions of any image, or features of given boxes.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from detector.config import SelectionRule
from e2e_vl.api.inputs import ImageFile, ImageInput, given_boxes, image_file
from e2e_vl.api.results import FoundRegions
from e2e_vl.extraction.regions import LoadedDetector, extract_image
from e2e_vl.extraction.settings import SHOWN
from e2e_vl.samples import AnnotatedObjects


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The given device; None: the GPU, or the CPU if there is no GPU or ACCELERATE_USE_CPU is true."""
    if device is None:
        if torch.accelerator.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
            return torch.accelerator.current_accelerator()
        return torch.device("cpu")
    return torch.device(device)


class TrainedDetector:
    """A loaded detector with its class names, see `e2e_vl.load_detector`.

    It is thread-safe. Boxes are xyxy in pixels of the original image.
    """

    def __init__(self, source: LoadedDetector, device: str | torch.device | None = None):
        self.source = source
        self.network = source.detector.to(chosen_device(device)).eval()

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the detector's classes; None: unknown."""
        return self.network.class_names

    def regions(
        self,
        image: ImageInput,
        *,
        boxes: Any = None,
        min_score: float = SHOWN.min_score,
        min_regions: int = SHOWN.min_regions,
        max_regions: int = SHOWN.max_regions,
        stacklevel: int = 2,
    ) -> FoundRegions:
        """Predicted regions, best score first, or the given boxes with features and classes, in their order.

        Predicted boxes are selected by the rule "score" (`ExtractionSettings`), as in bulk extraction and in training.
        The defaults suit the display of a photo: 0.2 and 10 to 36, instead of 0.5 and 10 to 100 (VL-BERT, section 4.1).

        Args:
            image: a path, bytes, a PIL image or a uint8 array (`e2e_vl.api.inputs.image_file`).
            boxes: [R, 4], or words or a file as in `TrainedModel.ask`; None: predicted boxes.
            min_score: score threshold of predicted boxes.
            min_regions, max_regions: limits of the number of predicted boxes; they take precedence over `min_score`.
            stacklevel: of the warning that predicted boxes are random.
        """
        if boxes is None and self.source.warning:
            warnings.warn(self.source.warning, stacklevel=stacklevel)
        rule = SelectionRule(min_score, min_regions, max_regions)
        return self.find(image_file(image), given_boxes(boxes), rule)

    def find(self, file: ImageFile, given: AnnotatedObjects | None, rule: SelectionRule) -> FoundRegions:
        """`regions` without the warning."""
        found = extract_image(file, self.source, rule, given)
        names = [f"class {row}" if self.class_names is None else self.class_names[row] for row in found.classes]
        attributes = [] if found.attributes is None else [self.source.attribute_names[row] for row in found.attributes]
        return FoundRegions(found.boxes, found.scores, found.classes, names, found.features, attributes, file)
