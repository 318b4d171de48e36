"""The detectors that compute their features from pixels, by name."""

from __future__ import annotations

from detector.choices import BACKENDS
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN, TwoStageDetector


def detector_class(backend: str) -> type[TwoStageDetector]:
    """The class of a backend; its `config_class` reads the settings it is built from.

    Raises:
        ValueError: the backend does not exist, or Detectron2 is not installed.
    """
    if backend == "builtin":
        return FasterRCNN
    if backend != "detectron2":
        raise UserError(f"There is no detector backend '{backend}'; use one of {', '.join(BACKENDS)}.")
    try:
        from detector.detectron2_adapter import Detectron2Detector  # imported only when it is chosen
    except ImportError as error:
        raise UserError(str(error)) from error
    return Detectron2Detector
