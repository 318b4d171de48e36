"""A tiny hand-made VCR in the official file formats: three questions about two images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from e2e_vl.config import DataConfig
from e2e_vl.data.config import CLASS_NAMES
from e2e_vl.data.vcr import VCRDataset
from e2e_vl.tasks.config import NEUTRAL_NAMES
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.data.helpers import open_dataset

OBJECTS = ["person", "person", "chair", "person"]
BOXES = [[0, 0, 20, 59, 0.9], [30, 0, 50, 59, 0.8], [60, 30, 95, 59, 0.7], [52.5, 10, 58, 20, 0.5]]
WORDS = "why is there no yes so not everyone and chair ' s . ?"


class TinyVCR:
    """Lines and metadata (change them, then `write`)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images_root = root / "vcr1images"
        self.file = root / "val.jsonl"
        self.lines = [
            {
                "annot_id": f"val-{number}",
                "img_fn": f"film/{image}.png",
                "metadata_fn": f"film/{image}.json",
                "objects": list(OBJECTS),
                "question": ["Why", "is", [1, 2], "there", "?"],
                "answer_choices": [["No", [0], "."], ["Yes", "."], [[1], "'", "s", "chair", "."], ["No", "."]],
                "answer_label": 2,
                "rationale_choices": [["So", "."], [[3], "is", "."], ["Not", "so", "."], ["Everyone", "is", "."]],
                "rationale_label": 1,
                "movie": "film",
            }
            for number, image in enumerate(["a", "b", "a"])
        ]
        self.metadata = {
            "boxes": BOXES,
            "segms": [[[[x1, y1], [x2, y1], [x2, y2], [x1, y2]]] for x1, y1, x2, y2, _ in BOXES],
            "names": list(OBJECTS),
            "width": 100,
            "height": 60,
        }

    def write(self) -> TinyVCR:
        folder = self.images_root / "film"
        folder.mkdir(parents=True, exist_ok=True)
        for name in "ab":
            pixels = np.arange(60 * 100 * 3, dtype=np.uint8).reshape(60, 100, 3)
            Image.fromarray(pixels).save(folder / f"{name}.png")
            (folder / f"{name}.json").write_text(json.dumps(self.metadata))
        self.file.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self

    def dataset(self, *, training: bool = False, **options) -> VCRDataset:
        """The questions and metadata as they are now, written, and read with these options."""
        return self.write().opened(training=training, **options)

    def opened(self, *, training: bool = False, **options) -> VCRDataset:
        """The files, read with these options."""
        return open_dataset(VCRDataset, self.settings(config=options), "val", "gt", training=training)

    def settings(self, **changes) -> DataConfig:
        files = {"images": "vcr1images", "questions": "{split}.jsonl"}
        return DataConfig(**({"name": "vcr", "root": str(self.root), "files": files} | changes))

    @property
    def tokenizer(self):
        build_vocabulary([WORDS, *CLASS_NAMES, *NEUTRAL_NAMES], self.root / "vocab.txt")
        return load_tokenizer(self.root / "vocab.txt")
