"""Folders of transformers' VisualBERT <-> names of our encoder and heads.

Our encoder has the names of transformers' `VisualBertModel`, whose folders need no adapter. Models with a head have
`visual_bert.` in front of them, and heads with names of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.visual_bert.configuration_visual_bert import VisualBertConfig

from detector.errors import UserError
from e2e_vl.encoders.visual_bert import VisualBertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import ModelWeights, WeightAdapter, replace_module, require_transformers_name
from e2e_vl.weights.visual_bert import (
    ENCODER,
    HEADS,
    NO_HEAD,
    PROJECTION,
    check_architecture,
    converted,
    head_of,
    parts_of,
)
from e2e_vl.whole_files import whole_parts

ENCODER_CONFIG = {"region_position": "official"}  # users name the types of regions in each call
TRUNK = "visual_bert."
RENAMED = {"classifier": "cls", "flickr_attention": "attention"}  # official heads; the others have the same names
WORD_BIAS = "cls.predictions.bias"
WORD_BIAS_AGAIN = "cls.predictions.decoder.bias"
POSITION_IDS = "embeddings.position_ids"  # indices that old versions saved


class TransformersVisualBert(WeightAdapter):
    """VisualBERT of transformers with a head, in and out."""

    layout = "transformers' VisualBERT"
    suffix = ".safetensors"

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        is_old_trunk = POSITION_IDS in tensors and PROJECTION in tensors
        return is_old_trunk or any(name.startswith(TRUNK) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """Take a state dict apart, cast to float32.

        Raises:
            ValueError: a name that no VisualBERT has, or a decoder that is not the word table.
        """
        prefix = TRUNK if any(name.startswith(TRUNK) for name in tensors) else ""
        trunk = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        trunk.pop(POSITION_IDS, None)
        head = {_official(name): value for name, value in tensors.items() if not name.startswith(prefix)}
        bias = head.pop(WORD_BIAS_AGAIN, None)
        if bias is not None and not torch.equal(head.setdefault(WORD_BIAS, bias), bias):
            raise UserError(f"{source}: {WORD_BIAS_AGAIN} differs from {WORD_BIAS}; the file is damaged.")
        return converted(trunk, head, {name: name for name in ENCODER.values()}, source)

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """See `check_architecture`."""
        check_architecture(tensors, encoder, source)
        return tensors, []

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write `model.safetensors`, and beside it the `config.json` with which transformers reads the folder.

        A task that has no head in transformers gives the trunk alone (`VisualBertModel`). Users of the folder pass
        `visual_token_type_ids` as `region_types` says (transformers takes 1 if they are left out), and features that
        end with the numbers of the boxes if the encoder has `with_box_numbers`.

        Returns:
            names (`detector.`, `task.`) of what was left out.

        Raises:
            ValueError: transformers has no such model, or the file has another name.
        """
        path = Path(path)
        require_transformers_name(path)
        parts = parts_of(model, task_name, path, ENCODER_CONFIG)
        if model.encoder.config.bypass_transformer:
            raise UserError(f"{path}: transformers' late fusion (bypass_transformer) fails; write a .th file.")
        state, left_out = transformers_state(parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        with whole_parts(path.parent, "config.json") as part:
            save_file(tensors, part / path.name, metadata={"format": "pt"})
            transformers_config(model.encoder, parts).save_pretrained(part)
        return left_out


def transformers_state(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `TransformersVisualBert.convert`; what is tied to something else is left to transformers.

    Returns:
        the weights by transformers' names, and what was left out, see `head_of`.

    Raises:
        ValueError: transformers' model for this task has another head.
    """
    head, left_out = head_of(parts)
    prefix = TRUNK if parts.task_name in HEADS else ""
    state = {f"{prefix}{name}": value for name, value in parts.encoder.items()}
    return state | {replace_module(name, RENAMED) or name: value for name, value in head.items()}, left_out


def transformers_config(encoder: VisualBertEncoder, parts: ModelWeights) -> VisualBertConfig:
    """The settings that both projects have. No row of the word table is padding, as in the official code."""
    rule, own = HEADS.get(parts.task_name, NO_HEAD), encoder.config.to_dict()
    shared = {field.name for field in dataclasses.fields(VisualBertConfig)} & own.keys()
    fields = {name: own[name] for name in shared - {"architectures", "model_type", "pad_token_id"}}
    if rule.counts_labels:
        fields["num_labels"] = len(parts.task["head.output.weight"])
    return VisualBertConfig(
        **fields,
        visual_embedding_dim=encoder.config.visual_embedding_dim,
        pad_token_id=None,
        architectures=[rule.architecture],
    )


def _official(name: str) -> str:
    """The official name of a parameter of a head."""
    if name.startswith(("cls.predictions.", "cls.seq_relationship.")):
        return name
    return replace_module(name, {theirs: official for official, theirs in RENAMED.items()}) or name
