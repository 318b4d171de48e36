"""What settings and commands choose from (a file of its own, so that they can be checked without torch)."""

from __future__ import annotations

BACKENDS = ("builtin", "detectron2")  # detectors that compute their features from pixels, see `detector_class`
EXPECTED_PARTS = ("all", "no_attributes", "backbone")  # what a weights file must hold, see `EXPECT` in checkpoint.py
