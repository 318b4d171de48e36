"""Thirty questions about ten real photos in the official VQA format. E2E_VL_REAL_MINI names their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e_vl.config import DataSettings, ResizeSettings
from e2e_vl.data.examples import Request
from e2e_vl.data.vqa import VQADataset
from e2e_vl.evaluation.vqa import answer_accuracy
from e2e_vl.text import build_vocabulary, load_tokenizer

DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "real_mini"


def test_all_questions_and_photos_are_read(tmp_path):
    root = Path(os.environ.get("E2E_VL_REAL_MINI", DEFAULT))
    if not (root / "vqa").is_dir():
        pytest.skip(f"the ten real photos are not at {root}; set E2E_VL_REAL_MINI to their folder")
    settings = DataSettings(
        name="vqa",
        root=str(root),
        files={
            "images": "images/{images}",
            "questions": "vqa/v2_OpenEnded_mscoco_{split}_questions.json",
            "annotations": "vqa/v2_mscoco_{split}_annotations.json",
            "instances": "refcoco+/instances.json",
        },
        resize=ResizeSettings(short_edge=[100], long_edge=200),
    )
    build_vocabulary(VQADataset.texts_of(settings, "train2014"), tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    dataset = VQADataset.from_settings(
        settings,
        tokenizer,
        "train2014",
        boxes="gt",
        training=False,
        seed=0,
        channel_order="BGR",
        with_objects=False,
    )
    assert len(dataset) == 30 and len(dataset.groups) == 10
    for group, texts in enumerate(dataset.groups):
        example = dataset[Request(group, tuple(texts))]
        assert len(example.images[0].boxes)
        for text in example.texts:
            assert tokenizer.unk_token_id not in text.input_ids
            assert text.input_ids[text.positions["mask"]] == tokenizer.mask_token_id
            assert len(text.record["answers"]) == 10
            assert answer_accuracy(text.record["multiple_choice_answer"], text.record["answers"]) > 0.5
