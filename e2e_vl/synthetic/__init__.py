"""Drawn scenes and texts about them, written in the official file formats; imports no reader of these formats."""

from __future__ import annotations

from e2e_vl.synthetic.base import ImitatedDetectorConfig as DetectionConfig
from e2e_vl.synthetic.generate import FORMATS, make_scenes
from e2e_vl.synthetic.language import LanguageConfig
from e2e_vl.synthetic.scenes import SceneConfig

__all__ = ["FORMATS", "DetectionConfig", "LanguageConfig", "SceneConfig", "make_scenes"]
