from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from tests.data.tiny_vcr import TinyVCR
from tests.tasks.preprocessors import make_tokenizer

WORDS = (
    "is it what caption 0 1 2 3 4 5 6 7 8 9 cat dog gray and man shirt hot yes no image ? .",
    "a red square stands left of the box on the right side or the blue",
)


@pytest.fixture
def grey(tmp_path: Path) -> str:
    """The file of a grey photo of 90 x 60 pixels."""
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((60, 90), 200, np.uint8))
    return str(tmp_path / "grey.png")


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    return make_tokenizer(tmp_path, *WORDS)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyVCR:
    return TinyVCR(tmp_path)
