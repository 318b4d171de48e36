"""One image and one phrase in, the box that the phrase refers to out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from detector.images import load_image, resize_image
from e2e_vl.data.collate import collate
from e2e_vl.data.examples import Example, ImageExample, TextExample
from e2e_vl.engine.build import resize_rules
from e2e_vl.engine.checkpoint import load_model
from e2e_vl.text import encode_text


def ground_phrase(run_dir: Path, image_path: Path, text: str) -> dict[str, Any]:
    """Find what a phrase refers to, with the boxes of the model's own detector.

    Args:
        run_dir: run directory of tools/train.py, or a saved model folder.
        image_path: any JPEG or PNG.
        text: the referring expression.

    Returns:
        `box` [4], `score` (probability), `boxes` [R, 4] and `scores` [R] of all candidates; boxes are xyxy in pixels of
        the original image.

    Raises:
        FileNotFoundError, ValueError: no model or image there, or an empty phrase.
    """
    if not text.strip():
        raise ValueError("The phrase is empty; say what to look for.")
    config, model, tokenizer = load_model(Path(run_dir))
    detector_config = model.detector.config
    image = load_image(image_path, detector_config.input_format)
    height, width = image.shape[:2]
    resized = resize_image(image, resize_rules(config)[-1].target_size(height, width))
    ids = encode_text(tokenizer, text.lower(), config.data.max_text_length)
    example = Example(
        images=[ImageExample(pixels=resized, original_size=(height, width), name=str(image_path))],
        texts=[
            TextExample(
                input_ids=ids,
                segment_ids=[0] * len(ids),
                looks_at=[0],
                targets={"box": np.zeros(4, dtype=np.float32)},  # unknown; only the loss would read it
                record={"sent": text, "file_name": str(image_path)},
            )
        ],
    )
    batch = collate([example], detector_config.pixel_mean, detector_config.pixel_std)
    with torch.no_grad():
        record = model.task.predict(batch, model(batch))[0]
    return {
        "box": record["box"],
        "score": record["score"],
        "boxes": record["candidate_boxes"],
        "scores": record["candidate_scores"],
    }
