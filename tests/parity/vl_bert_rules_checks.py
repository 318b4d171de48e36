"""Small rules of pre-training against what the official VL-BERT code computed: soft labels, wordpieces, cutting."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from detector.structures import ImageBatch
from e2e_vl.region_masking import truncate_batch
from e2e_vl.structures import Batch, EncoderOutput, MaskingBatch, RegionLabels, RegionMasks, TextBatch
from e2e_vl.targets import Targets
from e2e_vl.tasks.config import MaskedRegionsConfig, PretrainingConfig
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.objectives.regions import MaskedRegions
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets, PretrainingTask
from e2e_vl.text import SPECIAL_TOKENS, basic_tokenize, load_tokenizer
from tests.parity import vl_bert_common as common
from tests.regions import regions_of_own_images

golden = common.golden


@pytest.fixture(scope="module")
def rules(golden_root) -> dict:
    return json.loads((golden_root / "vl_bert" / "data.json").read_text(encoding="utf-8"))


def region_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Mean over the labelled rows, of which each is a region of one text; all rows are labelled."""
    count, classes = logits.shape
    objective = MaskedRegions(Sizes(classes, vocab_size=2), MaskedRegionsConfig(classes=classes))
    objective.classify = lambda states: states  # the states are the logits
    task = PretrainingTask(Sizes(classes, 2), PretrainingConfig(), {"masked_regions": objective})
    batch = Batch(
        images=ImageBatch(torch.zeros(1, 3, 4, 4), torch.full((1, 2), 4), torch.full((1, 2), 4), ["image"]),
        boxes=[torch.zeros(count, 4)],
        texts=TextBatch(torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), torch.ones(1, 1).bool()),
        image_index=torch.zeros(1, 1).long(),
        targets=PretrainingTargets({"masked_regions": Targets()}),
        masking=MaskingBatch(masked_regions=RegionMasks([torch.ones(count).bool()], [torch.zeros(count).bool()])),
        region_labels=RegionLabels(class_probs=[truth]),
    )
    attention_mask = torch.ones(1, count).bool()
    regions = regions_of_own_images(
        torch.zeros(1, count, 1),
        torch.zeros(1, count, 4),
        torch.ones(1, count, 2),
        attention_mask,
        torch.zeros(1, count).long(),
    )
    words, table = torch.zeros(1, 1, classes), torch.zeros(2, classes)
    return task(batch, regions, EncoderOutput(words, logits[None], word_embeddings=table)).losses["masked_regions"].mean


def test_soft_cross_entropy_of_regions(golden):
    ops = golden["ops"]
    logits, truth = ops["soft_ce.logits"], ops["soft_ce.target"]
    common.assert_near(region_loss(logits, truth), ops["soft_ce.mean"], "soft_ce.mean")
    for row, recorded in enumerate(ops["soft_ce.none"]):  # 0 at rows that are not counted
        ours = region_loss(logits[row : row + 1], truth[row : row + 1])
        common.assert_near(ours, recorded, f"soft_ce.none, row {row}")


def test_words_and_wordpieces(rules, tmp_path):
    recorded = rules["wordpiece"]
    assert recorded
    lines = {index: piece for one in recorded for index, piece in zip(one["ids"], one["pieces"], strict=True)}
    free = (index for index in range(10**6) if index not in lines)
    for special in [token for token in SPECIAL_TOKENS if token not in lines.values()]:  # [UNK] may be recorded
        lines[next(free)] = special
    words = [lines.get(index, f"[unused{index}]") for index in range(max(lines) + 1)]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    for one in recorded:
        assert basic_tokenize(one["text"]) == one["basic"]
        assert tokenizer.tokenize(one["text"]) == one["pieces"]
        assert tokenizer.convert_tokens_to_ids(one["pieces"]) == one["ids"]


def test_cutting_of_words_and_regions(golden, rules):
    """A batch with the recorded words and labels, made as long again as before it was cut."""
    arrays, cc = load_file(golden.folder / "data.safetensors"), rules["cc"]
    anything_cut = False
    for number, case in enumerate(cc["cases"]):
        text, labels = arrays[f"cc.{number}.text"], arrays[f"cc.{number}.mlm_labels"]
        lost = len(cc["caption_ids"]) + 2 - len(text)
        ids = torch.cat([text[:-1], torch.zeros(lost, dtype=torch.long), text[-1:]])[None]
        before = torch.cat([labels[:-1], torch.zeros(lost, dtype=torch.long), labels[-1:]])[None]
        boxes = arrays["cc.boxes"]
        batch = Batch(
            images=ImageBatch(torch.zeros(1, 3, 4, 4), torch.full((1, 2), 4), torch.full((1, 2), 4), ["image"]),
            boxes=[boxes],
            texts=TextBatch(ids, torch.zeros_like(ids), torch.ones_like(ids).bool()),
            image_index=torch.zeros(1, 1).long(),
            targets=PretrainingTargets({"masked_words": WordLabels(before)}),
        )
        cut = truncate_batch(batch, case["seq_len"], whole_image=True)
        assert cut.texts.attention_mask.all()
        np.testing.assert_array_equal(cut.texts.input_ids[0], text)
        np.testing.assert_array_equal(cut.targets.parts["masked_words"].labels[0], labels)
        assert cut.masking.region_limit.tolist() == [[len(arrays[f"cc.{number}.boxes"]) - 1]]
        hidden = arrays[f"cc.{number}.mvrc_ops_before_truncation"][
            : 1 + int(cut.masking.region_limit)
        ]  # and the whole image
        np.testing.assert_array_equal(hidden, arrays[f"cc.{number}.mvrc_ops"])
        anything_cut |= lost > 0 or cut.masking.region_limit.tolist() != [[len(boxes)]]
    if not anything_cut:
        pytest.skip("everything in the set is short enough to stay as it is")
