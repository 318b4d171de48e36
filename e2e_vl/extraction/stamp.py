"""How features came about, as JSON that goes with them: two files with equal stamps were made alike."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from torch import nn

from e2e_vl.extraction.detectors import LoadedDetector
from e2e_vl.extraction.settings import ExtractionSettings


def make_stamp(
    source: LoadedDetector, settings: ExtractionSettings, *, boxes_file: Path | None = None, precision: str = "no"
) -> dict[str, Any]:
    """The stamp of one extraction.

    Args:
        source: the detector, its weights file and the image size.
        settings: which boxes are described.
        boxes_file: the file of given boxes.
        precision: Accelerate's mixed precision; like the backend and the NMS threshold, it is written only if it is not
            the default.
    """
    detector, config = source.detector, source.detector.config
    is_given = settings.rule == "given"
    numbers = None if is_given else dataclasses.asdict(settings.numbers)
    unusual = {"backend": source.backend} if source.backend != "builtin" else {}
    unusual |= {"precision": precision} if precision != "no" else {}
    unusual |= {"nms_threshold": settings.nms_threshold} if settings.nms_threshold != 0.3 else {}
    return {
        "format": "e2e-vl region features 1",
        **unusual,
        "detector": config.to_flat(),
        "weights": {
            "file": None if source.weights is None else source.weights.name,
            "file_sha256": None if source.weights is None else file_hash(source.weights),
            "random_seed": source.seed if source.weights is None else None,
            "parameters_sha256": parameters_hash(detector),
        },
        "channel_order": config.input.format,
        "resize": dataclasses.asdict(source.resize),
        "box_rule": {"rule": settings.rule, "selection": numbers, "boxes_sha256": boxes_file and file_hash(boxes_file)},
        "features_of": "given boxes" if is_given else settings.features_of,
        "attributes": settings.attributes,
        "image_feature": settings.image_feature,
        "feature_dim": detector.feature_dim,
        "box_format": "x1, y1, x2, y2 in pixels of the original image, continuous",
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parameters_hash(module: nn.Module) -> str:
    """SHA-256 of all names, shapes and values of a state dict: the same for equal weights from different files."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
