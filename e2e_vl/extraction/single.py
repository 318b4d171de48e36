"""The regions of one image, and the image as the detector saw it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from detector.selection_rule import SelectionRule
from e2e_vl.data.formats.image_lists import ListedImage
from e2e_vl.data.storage.features.record import RegionFeatures
from e2e_vl.extraction.chain import RegionExtractor, load_input
from e2e_vl.extraction.detectors import LoadedDetector
from e2e_vl.extraction.settings import ExtractionSettings


@dataclasses.dataclass(frozen=True)
class ImageRegions:
    """The regions of one image, best score first."""

    regions: RegionFeatures
    pixels: np.ndarray  # uint8 [h, w, 3] RGB, the resized image that the detector saw


def extract_image(path: str | Path, source: LoadedDetector, rule: SelectionRule) -> ImageRegions:
    """Find and describe the regions of a JPEG or PNG file: the chain of bulk extraction with a batch of one.

    The rule is "score". Features are the ones that a model with this detector sees: of the proposals or of the final
    boxes, as the config's MODEL.ROI_HEADS.FEATURES_OF says.

    Raises:
        FileNotFoundError, ValueError: there is no such image, or it is not readable.
    """
    config = source.detector.config
    image = load_input(ListedImage(Path(path).stem, Path(path)), source.resize, config.input.format)
    settings = ExtractionSettings("score", rule, config.roi_heads.features_of)
    (regions,) = RegionExtractor(source.detector, settings)([image])
    pixels = image.pixels if config.input.format == "RGB" else np.ascontiguousarray(image.pixels[:, :, ::-1])
    return ImageRegions(regions, pixels)
