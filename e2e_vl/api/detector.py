"""The public detector API: regions of any image, or features of given boxes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias, TypedDict, Unpack, overload

import torch

from detector.config import SelectionRule
from detector.errors import UserError
from e2e_vl.api.results import ImageRegions
from e2e_vl.config import DISPLAY_SELECTION
from e2e_vl.data.user_images import ImageFile, expand_images, to_image_file
from e2e_vl.data.user_inputs import boxes_of_image, convert_boxes
from e2e_vl.extraction.regions import LoadedDetector, extract_image
from e2e_vl.run.devices import choose_device, choose_precision, computing_in
from e2e_vl.samples import AnnotatedObjects

Images: TypeAlias = list[Any] | Iterator[Any]  # arguments that are many images, whatever they hold


class RegionOptions(TypedDict, total=False):
    """The options of `TrainedDetector.regions`, for type checkers."""

    boxes: Any
    min_score: float | None
    min_regions: int | None
    max_regions: int | None
    stacklevel: int


class TrainedDetector:
    """A loaded detector with its class names, see `e2e_vl.load_detector`.

    It is thread-safe. Boxes are xyxy in pixels of the original image.
    """

    def __init__(
        self,
        source: LoadedDetector,
        device: str | int | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ):
        """Put a detector on a device; it computes in `dtype` (None: float32), see `computing_in`."""
        self.source = source
        self.dtype = torch.float32 if dtype is None else choose_precision(dtype)
        self.network = source.detector.to(choose_device(device)).eval()

    @property
    def device(self) -> torch.device:
        """The device that the detector is on."""
        return next(self.network.parameters()).device

    def to(
        self, device: str | int | torch.device | torch.dtype | None = None, dtype: str | torch.dtype | None = None
    ) -> TrainedDetector:
        """Move the detector to a device, let it compute in another dtype, or both, and return it."""
        if isinstance(device, torch.dtype):  # `to(torch.bfloat16)`, as for torch's modules
            dtype = device
            device = None
        precision = self.dtype if dtype is None else choose_precision(dtype)
        if device is not None:
            self.network.to(choose_device(device))
        self.dtype = precision
        return self

    def __repr__(self) -> str:
        return f"<TrainedDetector {self.source.weights or 'of a run'}, {self.network.num_classes} classes>"

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the detector's classes; None: unknown."""
        return self.network.class_names

    @overload
    def regions(self, image: Images, **options: Unpack[RegionOptions]) -> list[ImageRegions]: ...
    @overload
    def regions(self, image: Any, **options: Unpack[RegionOptions]) -> ImageRegions | Any: ...  # a list for a folder
    def regions(
        self,
        image: Any,
        *,
        boxes: Any = None,
        min_score: float | None = None,
        min_regions: int | None = None,
        max_regions: int | None = None,
        stacklevel: int = 2,
    ) -> ImageRegions | list[ImageRegions]:
        """Predict regions, best score first, or compute features and classes of the given boxes, in their order.

        Predicted boxes are selected by the rule "score" (`ExtractionConfig`), as in bulk extraction. The defaults
        suit the display of an image: 0.2 and 10 to 36, instead of 0.5 and 10 to 100 (VL-BERT, section 4.1). A stated
        value wins over the defaults of the others, see `SelectionRule`.

        Args:
            image: one image, see `to_image_file` in `e2e_vl/data/user_images.py`; or many in a folder, a pattern, a
                list or tuple, an iterator or a batch, see `expand_images`.
            boxes: [R, 4], or strings or a file as in `TrainedModel.ask`; None: predicted boxes.
            min_score: score threshold; exactly the predicted boxes from this score on are kept, perhaps none.
            min_regions: least number of predicted boxes; together with `max_regions` it wins over `min_score`.
            max_regions: largest number of predicted boxes.
            stacklevel: stack level of the warnings that predicted boxes are random, and that an image is none of the
                synthetic scenes which the detector knows.

        Returns:
            The regions of the image, or a list with those of each of many images, in their order.

        Raises:
            UserError: the limits contradict each other, or `boxes` are given together with limits.
        """
        rule = DISPLAY_SELECTION.with_stated(min_score, min_regions, max_regions)
        if boxes is not None and rule != DISPLAY_SELECTION:
            raise UserError("All given boxes are kept; leave out min_score, min_regions and max_regions, or boxes.")
        given_boxes = convert_boxes(boxes)
        if isinstance(image, tuple):  # for `ask`, a tuple is one text's images; here it is a list
            image = list(image)
        images = expand_images(image)
        is_list = images is not None
        if not is_list:
            images = [image]
        results = []
        for file in map(to_image_file, images):
            results.append(self.find_regions(file, boxes_of_image(given_boxes, file), rule))
        for warning in dict.fromkeys(result.warning for result in results if result.warning):
            warnings.warn(warning, stacklevel=stacklevel)
        return results if is_list else results[0]

    def find_regions(self, file: ImageFile, given_boxes: AnnotatedObjects | None, rule: SelectionRule) -> ImageRegions:
        """Find the regions of one image, as `regions` does, without `warnings.warn`."""
        with computing_in(self.dtype, self.device):
            regions = extract_image(file, self.source, rule, given_boxes)
        warning = ""
        if given_boxes is None:
            warning = self.source.warning
        if not warning:
            warning = self.source.drawn_scenes.size_warning(regions.image_size)
        predictions = regions.predictions
        if self.class_names is None:
            names = [f"class {class_index}" for class_index in predictions.classes]
        else:
            names = [self.class_names[class_index] for class_index in predictions.classes]
        attributes = []
        if predictions.attributes is not None:
            attributes = [self.source.attribute_names[attribute] for attribute in predictions.attributes]
        return ImageRegions(
            boxes=regions.boxes,
            scores=predictions.scores,
            classes=predictions.classes,
            names=names,
            features=regions.features,
            attributes=attributes,
            image=file,
            warning=warning,
        )
