"""One image and one phrase in, the box that the phrase refers to out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from detector.images import ResizeRule, load_resized
from e2e_vl.data.examples import Example, ImageExample, TextExample
from e2e_vl.engine.build import build_collate
from e2e_vl.engine.checkpoint import load_model


def ground_phrase(run_dir: Path, image_path: Path, text: str) -> dict[str, Any]:
    """Find what a phrase refers to, with the boxes of the model's own detector.

    Args:
        run_dir: run directory of tools/train.py, or a saved model folder.
        image_path: any JPEG or PNG.
        text: the referring expression; cut to the run's `data.max_text_length` as in training.

    Returns:
        `box` [4] (None if there is no region and the task allows that), `score` (probability), `boxes` [R, 4] and
        `scores` [R] of all candidates; boxes are xyxy in pixels of the original image.

    Raises:
        FileNotFoundError, ValueError: no model or image there, an empty phrase, or a model of another task.
    """
    if not text.strip():
        raise ValueError("The phrase is empty; say what to look for.")
    config, model, tokenizer = load_model(Path(run_dir))
    if not model.task.points_at_box:
        raise ValueError(
            f"{run_dir} was trained for the task '{config.task.name}', which does not answer a phrase with a box; give "
            "a run of a task that does, such as refcoco."
        )
    resize = config.data.resize
    rule = ResizeRule(resize.short_edge[-1], resize.long_edge, resize.rounding)
    pixels, original_size = load_resized(image_path, rule, model.detector.config.input.format)
    longest = config.data.max_text_length
    ids = np.array(tokenizer(text, truncation=longest is not None, max_length=longest)["input_ids"], dtype=np.int64)
    example = Example(
        images=[ImageExample(pixels=pixels, original_size=original_size, name=str(image_path))],
        texts=[
            TextExample(
                input_ids=ids,
                segment_ids=np.zeros_like(ids),
                looks_at=(0,),
                targets={},
                record={"sent": text, "file_name": str(image_path)},
            )
        ],
    )
    batch = build_collate(model)([example])
    with torch.no_grad():
        record = model.task.predict(batch, model(batch))[0]
    return {
        "box": record["box"],
        "score": record["score"],
        "boxes": record["candidate_boxes"],
        "scores": record["candidate_scores"],
    }
