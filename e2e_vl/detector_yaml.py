"""The detector's settings of a run. (A file of its own, without torch, so that a mistyped key is answered at once.)"""

from __future__ import annotations

from detector.config import DetectorConfig
from detector.errors import MissingFileError, UserError
from detector.zoo import NamedWeights, resolve_weights, similar_names
from e2e_vl.config import DetectorSettings


def read_detector_config(settings: DetectorSettings) -> DetectorConfig:
    """The Detectron2 YAML file (or the one of published weights), with `detector.overrides` on top.

    Raises:
        FileNotFoundError, ValueError: no such file, or keys or values that no detector can be built from.
    """
    published = resolve_weights(settings.config)
    path = published.config_path if isinstance(published, NamedWeights) else published
    if not path.is_file():
        similar = similar_names(settings.config)
        hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
        raise MissingFileError(
            f"Detector config {path} does not exist; set detector.config to a Detectron2 YAML file, or to the name of "
            f"published weights.{hint}"
        )
    if path.suffix != ".yaml":
        raise UserError(f"detector.config is {path}; it must be a Detectron2 YAML file, whose name ends in .yaml.")
    if not settings.overrides:
        return DetectorConfig.from_yaml(path)
    # not `resolve`: the cache of the Hugging Face hub links to files without an ending
    return DetectorConfig.from_yaml({"_BASE_": str(path.absolute()), **settings.overrides})
