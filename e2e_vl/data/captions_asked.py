"""A user's text about an image for a pre-training run: words at [MASK] and hidden regions are to be named."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from e2e_vl.config import DataSettings
from e2e_vl.data.asked import Asked
from e2e_vl.data.caption_settings import data_path
from e2e_vl.data.coco import read_instances
from e2e_vl.data.examples import Example, TextExample
from e2e_vl.data.masking import NO_LABEL, word_pieces


def asked_example(
    asked: Asked, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, channel_order: str
) -> Example:
    """The text as `[CLS] text [SEP]`, built as those of `CaptionDataset`, with nothing masked but what the user masked.

    Every [MASK] is its own label, so that the task predicts there; a loss of this text means nothing. The record has
    `num_masks`, and with hidden boxes `class_names`, those of `data.files.instances` if that file is there, else None.

    Raises:
        ValueError: nothing is to be predicted, a [MASK] would be cut off, or see `Asked.load`.
    """
    asked.refuse_choices("A pre-training run")
    ids = [piece for word in word_pieces(asked.text, tokenizer) for piece in word]
    kept = ids if settings.max_text_length is None else ids[: settings.max_text_length - 2]
    if tokenizer.mask_token_id in ids[len(kept) :]:
        raise ValueError(
            f"The text has {len(ids)} wordpieces, and the run reads {len(kept)}, so a [MASK] is lost; shorten the text."
        )
    ids = np.array([tokenizer.cls_token_id, *kept, tokenizer.sep_token_id], dtype=np.int64)
    is_mask = ids == tokenizer.mask_token_id
    if not is_mask.any() and not asked.hidden:  # a file may hold no box
        raise ValueError(
            "A pre-training run fills in what is missing: write [MASK] in the text, or hide a region with --hide."
        )
    image, _ = asked.load(settings, channel_order, asked.boxes, hides=True)
    record = asked.record() | {"num_masks": int(is_mask.sum())}
    if asked.hidden is not None:
        record["class_names"] = _class_names(settings)
    text = TextExample(
        input_ids=ids,
        segment_ids=np.zeros_like(ids),
        looks_at=(0,),
        targets={"mlm_labels": np.where(is_mask, ids, NO_LABEL), "is_match": np.array(1)},
        record=record,
        positions={"mask": int(is_mask.argmax())} if is_mask.any() else {},
    )
    return Example([image], [text])


def _class_names(settings: DataSettings) -> list[str] | None:
    """Of the annotated classes, in the detector's order; a saved model may stand alone, without files of its data."""
    if "instances" not in settings.files:
        return None
    path = data_path(settings, "instances", [*settings.eval_splits, settings.train_split][0])
    return read_instances(path, drop_empty_boxes=True).class_names if path.is_file() else None
