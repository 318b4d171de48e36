"""Synthetic scenes and texts about them, in the official file formats; imports no reader of these formats."""

from __future__ import annotations

from e2e_vl.synthetic.config import ImitatedDetectorConfig, LanguageConfig, SceneConfig
from e2e_vl.synthetic.generate import FORMATS, make_scenes

__all__ = ["FORMATS", "ImitatedDetectorConfig", "LanguageConfig", "SceneConfig", "make_scenes"]
