"""The regions of one image, and the image as the detector saw it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from detector.images import decode_resized, load_resized
from detector.selection_rule import SelectionRule
from e2e_vl.data.formats.image_lists import GivenBoxes
from e2e_vl.data.formats.user_boxes import require_inside
from e2e_vl.data.storage.features.record import RegionFeatures
from e2e_vl.extraction.chain import InputImage, RegionExtractor
from e2e_vl.extraction.detectors import LoadedDetector
from e2e_vl.extraction.settings import ExtractionSettings
from e2e_vl.samples import AnnotatedObjects, EncodedImage


@dataclasses.dataclass(frozen=True)
class ImageRegions:
    """The regions of one image, best score first."""

    regions: RegionFeatures
    pixels: np.ndarray  # uint8 [h, w, 3] RGB, the resized image that the detector saw


def extract_image(
    image: str | Path | EncodedImage,
    source: LoadedDetector,
    rule: SelectionRule,
    given: AnnotatedObjects | None = None,
) -> ImageRegions:
    """Find and describe the regions of an image file: the chain of bulk extraction with a batch of one.

    The rule is "score". Attributes are found where the source names them. Features are the ones that a model with this
    detector sees: of the proposals or of the final boxes, as the config's MODEL.ROI_HEADS.FEATURES_OF says.

    Args:
        rule: which of the detector's own boxes are kept.
        given: a user's boxes, which are described in their order in place of the detector's.

    Raises:
        FileNotFoundError, ValueError: there is no such image, it is not readable, or a given box leaves it.
    """
    config = source.detector.config
    order = config.input.format
    if isinstance(image, EncodedImage):
        name, path = image.name, Path(image.name)
        pixels, size = decode_resized(image.content, name, source.resize, order)
    else:
        name, path = Path(image).stem, Path(image)
        pixels, size = load_resized(image, source.resize, order)
    attributes = source.attribute_names is not None
    settings, wanted = ExtractionSettings("score", rule, config.roi_heads.features_of, attributes), None
    if given is not None:
        require_inside(given.boxes, size, given.origin, str(path))
        settings = ExtractionSettings("given", attributes=attributes)
        wanted = [GivenBoxes(np.asarray(given.boxes, dtype=np.float64), np.arange(len(given)))]
    [regions] = RegionExtractor(source.detector, settings)([InputImage(name, path, pixels, size)], wanted)
    return ImageRegions(regions, pixels if order == "RGB" else np.ascontiguousarray(pixels[:, :, ::-1]))
