"""What the comparisons with the official VisualBERT code share: the recorded set, and models with its weights.

Configs are read from the set's meta.json and sizes from its arrays, so that another set (`--golden-root`) is tested by
the same files.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from e2e_vl.encoders.layers import SequenceLayout
from e2e_vl.encoders.visual_bert import PretrainedVisualBertConfig, VisualBertEncoder
from e2e_vl.structures import EncoderOutput, TextBatch, TextRegions
from e2e_vl.tasks.objectives.base import MLMHead
from e2e_vl.text import load_tokenizer
from e2e_vl.weights.base import ModelWeights
from e2e_vl.weights.visual_bert import OfficialVisualBert
from tests.parity.vl_bert_common import RELATIVE, Golden, assert_near, optional
from tests.regions import regions_of_own_images

INPUTS = "embeddings"  # the file with the inputs of the encoder's cases
OPTIONAL = ("flickr", "late_fusion", "nlvr2", "optim", "training", "vcr", "vcr_detector", "vqa")
FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
)


@pytest.fixture(scope="session")
def visual_golden(golden_root: Path) -> Golden:
    return Golden(golden_root / "visual_bert", OPTIONAL)


@pytest.fixture(scope="session")
def data_rules(visual_golden: Golden) -> dict[str, Any]:
    """What was recorded of texts and targets, data.json."""
    visual_golden.require("data.json")
    return json.loads((visual_golden.folder / "data.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def rules_tokenizer(data_rules: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """With the recorded vocabulary."""
    file = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    file.write_text("".join(f"{word}\n" for word in part_of(data_rules, "vocab")), encoding="utf-8")
    return load_tokenizer(file)


def part_of(rules: dict[str, Any], *keys: str) -> Any:
    """A part of the rules that a set need not have; an empty one is none."""
    found: Any = rules
    for key in keys:
        found = found.get(key)
        if not found:
            pytest.skip(f"the set has no {'.'.join(keys)} in data.json; it is optional")
    return found


def encoder_config(golden: Golden, **fields: Any) -> PretrainedVisualBertConfig:
    """The recorded encoder; the pooler's gradients are recorded too, although its optimiser leaves it out."""
    recorded = golden.meta["configs"]["encoder"]
    return PretrainedVisualBertConfig(
        **{field: recorded[field] for field in FIELDS},
        hidden_act=recorded["hidden_act"].split()[0],  # "gelu (erf)"
        feature_dim=recorded["visual_embedding_dim"],
        region_types=list(range(recorded["type_vocab_size"])),
        **{"train_pooler": True, **fields},
    )


def recorded_parts(golden: Golden, *files: str) -> ModelWeights:
    """The trunk, and what is under `state.` in the files, by our names."""
    state = dict(golden["trunk"])
    for file in files:
        state |= golden.part(file, "state.")
    return OfficialVisualBert().convert(state, golden.folder)


def recorded_encoder(golden: Golden, *files: str, **fields: Any) -> VisualBertEncoder:
    encoder = VisualBertEncoder(encoder_config(golden, **fields))
    encoder.load_state_dict(recorded_parts(golden, *files).encoder, strict=True)
    return encoder.eval()


def our_name(official: str) -> str:
    """Name of a parameter with its part, e.g. encoder.pooler.dense.bias."""
    parts = OfficialVisualBert().convert({official: torch.empty(0)}, "a name")
    [ours] = [f"{part}.{name}" for part in ("detector", "encoder", "task") for name in getattr(parts, part)]
    return ours


def recorded_texts(arrays: dict[str, Tensor]) -> TextBatch:
    return TextBatch(arrays["in.input_ids"], arrays["in.token_type_ids"], arrays["in.input_mask"].bool())


def recorded_regions(arrays: dict[str, Tensor], types: Tensor | None = None) -> TextRegions:
    """Regions without boxes, which the encoder does not read; `types` says which image they come from."""
    features, counts = arrays["in.features"], arrays["in.num_regions"]
    attention_mask = torch.arange(features.shape[1]) < counts[:, None]
    return regions_of_own_images(
        features=features,
        boxes=features.new_zeros(*attention_mask.shape, 4),
        image_sizes=features.new_ones(*attention_mask.shape, 2),
        attention_mask=attention_mask,
        image_slot=torch.zeros_like(attention_mask, dtype=torch.long) if types is None else types * attention_mask,
    )


def no_regions(arrays: dict[str, Tensor]) -> TextRegions:
    """What texts without an image have: one row of padding."""
    regions = recorded_regions(arrays | {"in.num_regions": torch.zeros_like(arrays["in.num_regions"])})
    return TextRegions(*(getattr(regions, field.name)[:, :1] for field in dataclasses.fields(regions)))


def word_counts(alignment: Tensor, regions: TextRegions, length: int) -> Tensor:
    """How often each word is listed for each region, from the recorded lists of positions, -1 = none."""
    alignment = alignment[:, : regions.attention_mask.shape[1]]  # rows beyond the regions are cut
    one_hot = F.one_hot(alignment.clamp(min=0), length)
    return (one_hot * (alignment != -1)[..., None]).sum(dim=2).to(regions.features.dtype)


@dataclasses.dataclass
class Case:
    """One recorded input of the encoder."""

    texts: TextBatch
    regions: TextRegions
    alignment: Tensor | None = None  # counts, see `word_counts`

    @property
    def is_real(self) -> Tensor:
        """bool [M, L + R]."""
        return torch.cat([self.texts.attention_mask, self.regions.attention_mask], dim=1)

    def embed(self, encoder: VisualBertEncoder) -> tuple[Tensor, SequenceLayout]:
        return encoder.embeddings.join(self.texts, self.regions, self.alignment)

    def run(self, encoder: VisualBertEncoder, output_attentions: bool = False) -> EncoderOutput:
        return encoder.encode(self.texts, *self.embed(encoder), output_attentions)


def make_case(golden: Golden, name: str) -> Case:
    """One of the cases plain, typed, aligned, aligned_long and text_only."""
    arrays = golden[INPUTS]
    texts = recorded_texts(arrays)
    if name == "text_only":
        return Case(texts, no_regions(arrays))
    regions = recorded_regions(arrays, arrays["in.visual_types"] if name == "typed" else None)
    if not name.startswith("aligned"):
        return Case(texts, regions)
    listed = optional(golden, INPUTS, "in.alignment" + name.removeprefix("aligned"))
    return Case(texts, regions, word_counts(listed, regions, texts.attention_mask.shape[1]))


def assert_slots_near(ours: Tensor, recorded: Tensor, case: Case, what: str) -> None:
    """Compare vectors of real words and regions; without regions only words are recorded."""
    length = recorded.shape[1]
    real = case.is_real[:, :length]
    assert_near(ours[:, :length][real], recorded[real], what)


# Pre-training


class PretrainingHeads(nn.Module):
    """The official heads of pre-training, by our names."""

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__()
        self.word_head = MLMHead(hidden_size, vocab_size)
        self.relationship = nn.ModuleDict({"head": nn.Linear(hidden_size, 2)})


class PretrainingModel(nn.Module):
    """The parts of a run's model that matter here, by its names."""

    phrase_head = None

    def __init__(self, encoder: VisualBertEncoder) -> None:
        super().__init__()
        self.detector = nn.Module()
        self.encoder = encoder
        self.task = PretrainingHeads(encoder.hidden_size, encoder.config.vocab_size)


def pretraining_model(golden: Golden, part: str, **fields: Any) -> PretrainingModel:
    """The model of a recorded loss, `pretrain` or `late_fusion`, in float64."""
    is_late = part == "late_fusion"
    files = ("pretrain", part) if is_late else ("pretrain",)
    encoder = recorded_encoder(golden, *files, **{"bypass_transformer": is_late, **fields})
    model = PretrainingModel(encoder)
    model.task.load_state_dict(recorded_parts(golden, *files).task, strict=True)
    return model.eval().double()


def pretraining_losses(golden: Golden, model: PretrainingModel, features: Tensor) -> dict[str, Tensor]:
    """The losses on the recorded texts and these features, and the scores of the sentences, by their recorded names."""
    arrays = golden["pretrain"]
    output = model.encoder(recorded_texts(arrays), recorded_regions(arrays | {"in.features": features}))
    words = model.task.word_head(output.text, output.word_embeddings).flatten(0, 1)
    sentence = model.task.relationship["head"](output.summary)
    losses = {
        "masked_lm_loss": F.cross_entropy(words, arrays["in.masked_lm_labels"].flatten(), ignore_index=-1),
        "next_sentence_loss": F.cross_entropy(sentence, arrays["in.is_random_next"]),
        "seq_relationship_logits": sentence,
    }
    return losses | {"loss": losses["masked_lm_loss"] + losses["next_sentence_loss"]}


# Gradients


def assert_gradients_near(golden: Golden, part: str, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Compare the gradients of a float64 run with the recorded ones: some arrays, and the norms of all parameters.

    Args:
        model: has parts `encoder` and `task`, and perhaps `detector`.
        inputs: by their recorded names, `in.*`.
    """
    gradients = {name: one.grad for name, one in (*model.named_parameters(), *inputs.items()) if one.grad is not None}

    def find(official: str) -> str:
        return official if official in inputs else our_name(official)

    norms, zero = golden.meta["grad_norms"][part], golden.meta["zero_gradients"][part]
    for prefix in ("grad.", "grad64."):
        for name, recorded in golden.part(part, prefix).items():
            if name not in zero:  # rounding errors, see below
                assert_near(gradients[find(name)], recorded, f"{part}.{prefix}{name}")
    assert set(gradients) - set(inputs) == {find(name) for name in (*norms, *zero) if not name.startswith("in.")}
    for name, norm in norms.items():
        if find(name) in gradients:  # norms of inputs that no check differentiates are recorded too
            assert float(gradients[find(name)].norm()) == pytest.approx(norm, rel=RELATIVE), name
    for name in zero:
        assert float(gradients[find(name)].norm()) < RELATIVE * max(norms.values()), name
