"""A detector to look at photos with: the regions of any image, or the features of given boxes.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from detector.config import SelectionRule
from detector.errors import UserError
from e2e_vl.api.inputs import ImageFile, ImageInput, given_boxes, image_file, stamp_of
from e2e_vl.api.results import FoundRegions
from e2e_vl.extraction.regions import LoadedDetector, extract_image, find_detector, with_names
from e2e_vl.extraction.settings import SHOWN
from e2e_vl.run.launch import refuse_missing_gpus
from e2e_vl.samples import AnnotatedObjects

# Where a model runs that is asked from Python.


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device that a user names; None: the GPU, or the CPU where there is no GPU or ACCELERATE_USE_CPU is true.

    Raises:
        ValueError: no name of a device, a device that this machine does not have, or (without a name) GPUs that
            CUDA_VISIBLE_DEVICES asks for and that do not exist.
    """
    if device is None:
        refuse_missing_gpus()
        if torch.accelerator.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
            return torch.accelerator.current_accelerator()
        return torch.device("cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device is {device!r}; give a name such as 'cpu', 'cuda' or 'cuda:1'.") from error
    if wanted.type != "cpu" and (wanted.index or 0) >= _count(wanted.type):
        raise UserError(f"device is '{wanted}', but torch finds no such device on this machine; use 'cpu'.")
    return wanted


def _count(kind: str) -> int:
    """How many devices of a kind torch finds."""
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type != kind:
        return 0
    return torch.accelerator.device_count()


class TrainedDetector:
    """A loaded detector with its class names; `e2e_vl.load_detector` makes one.

    It may be asked from several threads at a time. Boxes are xyxy in pixels of the original image.
    """

    def __init__(self, source: LoadedDetector, device: str | torch.device | None = None):
        self.source = source
        self.network = source.detector.to(chosen_device(device)).eval()

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Of the detector's classes; None: unknown."""
        return self.network.class_names

    def regions(
        self,
        image: ImageInput,
        *,
        boxes: Any = None,
        min_score: float = SHOWN.min_score,
        min_regions: int = SHOWN.min_regions,
        max_regions: int = SHOWN.max_regions,
    ) -> FoundRegions:
        """What the detector finds, best score first, or what it says about given boxes, in their order.

        Its own regions are chosen by the rule "score" (`ExtractionSettings`), as in bulk extraction and in training on
        boxes that the detector finds. The numbers differ: these are for looking at a photo, 0.2 and 10 to 36, where
        the others take 0.5 and 10 to 100 (VL-BERT, section 4.1).

        Args:
            image: a path, bytes, a PIL image or a uint8 array (`e2e_vl.api.inputs.image_file`).
            boxes: [R, 4], or words or a file as in `TrainedModel.ask`; None: the detector's own.
            min_score: its own regions score at least this, but their number stays between the other two.

        Raises:
            FileNotFoundError, ValueError: no readable image, numbers that contradict each other, or a box that lies
                outside the image.
        """
        if boxes is None:
            self.warn_of_random_boxes(stacklevel=3)
        rule = SelectionRule(min_score, min_regions, max_regions)
        return self.find(image_file(image), given_boxes(boxes, "boxes"), rule)

    def warn_of_random_boxes(self, stacklevel: int) -> None:
        """A Python warning about a detector whose predicted boxes mean nothing; `stacklevel` counts from here."""
        if self.source.warning:
            warnings.warn(self.source.warning, stacklevel=stacklevel)

    def find(self, file: ImageFile, given: AnnotatedObjects | None, rule: SelectionRule) -> FoundRegions:
        """`regions` without its warning."""
        stamp = stamp_of(file)
        found = extract_image(file, self.source, rule, given).regions
        names = [self.name_of(number) for number in found.classes.tolist()]
        attributes = []
        if found.attributes is not None:
            attributes = [self.source.attribute_names[number] for number in found.attributes.tolist()]
        return FoundRegions(found.boxes, found.scores, found.classes, names, found.features, attributes, file, stamp)

    def name_of(self, number: int) -> str:
        """The name of a class, or its number where the names are unknown."""
        return f"class {number}" if self.class_names is None else self.class_names[number]


def load_detector(
    source: str | Path,
    config: str | Path | None = None,
    device: str | torch.device | None = None,
    *,
    class_names: str | Path | None = None,
    attribute_names: str | Path | None = None,
) -> TrainedDetector:
    """Load published weights by name, the detector of a run, or a file with its config; see `e2e_vl.load_detector`."""
    return TrainedDetector(with_names(find_detector(source, config), class_names, attribute_names), device)
