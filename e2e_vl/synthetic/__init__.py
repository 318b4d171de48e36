"""Drawn scenes and expressions about them, written in the official file formats; imports no reader of them."""

from __future__ import annotations

from e2e_vl.synthetic.build import make_scenes
from e2e_vl.synthetic.detections import DetectionConfig
from e2e_vl.synthetic.sampling import LanguageConfig
from e2e_vl.synthetic.scenes import SceneConfig

__all__ = ["DetectionConfig", "LanguageConfig", "SceneConfig", "make_scenes"]
