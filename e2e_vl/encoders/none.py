"""No encoder: regions go to the task as the detector describes them, and words are not read.

For tasks that need no text (detection), and as the control of any task that reads one vector per region.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME

from e2e_vl.encoders.base import Encoder
from e2e_vl.encoders.size_limits import check_kinds
from e2e_vl.structures import Ability, EncoderOutput, TextBatch, TextRegions


class NoEncoderConfig(PreTrainedConfig):
    """Nothing to choose; both fields are filled in from the tokenizer and the detector."""

    model_type = "no_encoder"

    vocab_size: int = 0
    feature_dim: int = 2048
    uses_whole_image: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_kinds(self)


class NoEncoder(Encoder):
    """The identity on regions, without parameters."""

    config_class = NoEncoderConfig

    def __init__(self, config: NoEncoderConfig):
        super().__init__(config)
        self.post_init()

    def lacks(self, ability: Ability) -> str | None:
        """It has no ability."""
        return "this one reads no words and has no layers, so choose another encoder.name"

    @property
    def hidden_size(self) -> int:
        """The width of a region feature: what comes in goes out."""
        return self.config.feature_dim

    @property
    def dtype(self) -> torch.dtype:
        """float32; transformers would read it from the first parameter."""
        return torch.float32

    def forward(self, texts: TextBatch, regions: TextRegions, output_attentions: bool = False) -> EncoderOutput:
        """`regions` unchanged, `text` zeros; no summary and no attention maps."""
        text = regions.features.new_zeros(*texts.input_ids.shape, self.hidden_size)
        return EncoderOutput(text=text, regions=regions.features)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """As in transformers, with an empty weights file: it writes none for a model without parameters."""
        super().save_pretrained(save_directory, **options)
        save_file({}, Path(save_directory) / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
