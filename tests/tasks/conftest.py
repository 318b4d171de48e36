from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest


@pytest.fixture
def grey(tmp_path: Path) -> str:
    """The file of a grey photo of 90 x 60 pixels."""
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((60, 90), 200, np.uint8))
    return str(tmp_path / "grey.png")
