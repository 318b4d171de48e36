"""What every vision-and-language encoder offers the model, the tasks and the checkpoints.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from jaxtyping import Float, Int64
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME

from detector.errors import UserError
from e2e_vl.encoders.config import NoEncoderSettings
from e2e_vl.encoders.layers import GEOMETRY_LAYERS
from e2e_vl.parts import Settings, decode
from e2e_vl.structures import Ability, AttentionGraph, EncoderOutput, TextBatch, TextRegions
from e2e_vl.text import TextLayout


class EncoderConfig(PreTrainedConfig):
    """The transformers config of an encoder. Its fields are those of a Struct of settings, and the two below.

    A subclass names the Struct: `class MyConfig(EncoderConfig, settings=MySettings)`.
    """

    settings_class: ClassVar[type[Settings]]
    vocab_size: int = 30522
    feature_dim: int = 2048  # width of the detector's region features

    def __init_subclass__(cls, settings: type[Settings], **kwargs: Any) -> None:
        cls.settings_class = settings
        cls.__annotations__ = inspect.get_annotations(cls)
        for field in msgspec.structs.fields(settings):
            cls.__annotations__[field.name] = field.type
            has_factory = field.default_factory is not msgspec.NODEFAULT
            default = dataclasses.field(default_factory=field.default_factory) if has_factory else field.default
            setattr(cls, field.name, default)
        super().__init_subclass__(**kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        values = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(self.settings_class)}
        decode(values, self.settings_class, type(self).__name__)


class Encoder(PreTrainedModel):
    """texts + regions -> one vector per wordpiece, one per region and one for all.

    A subclass sets `config_class`, whose config has the fields `hidden_size` and `uses_whole_image`, and declares its
    text layout and its abilities. Saving and loading (`save_pretrained`, `from_pretrained`) come from transformers.
    """

    layout: ClassVar[TextLayout] = TextLayout()
    abilities: ClassVar[frozenset[Ability]] = frozenset()  # what it can do with every config
    # where transformers finds the word embeddings [V, E], a part of `embeddings`; `get_input_embeddings` returns it
    _input_embed_layer = "word_embeddings"
    own_start: ClassVar[tuple[type[nn.Module], ...]] = GEOMETRY_LAYERS  # whose `reset_parameters` gives start values

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config_class" in vars(cls):  # AutoConfig and AutoModel know the encoder from now on
            AutoConfig.register(cls.config_class.model_type, cls.config_class, exist_ok=True)
            AutoModel.register(cls.config_class, cls, exist_ok=True)

    @property
    def hidden_size(self) -> int:
        """E, the width of the output vectors of wordpieces and regions."""
        return self.config.hidden_size

    @property
    def summary_size(self) -> int:
        """X, the width of the summary; E unless an encoder says otherwise."""
        return self.hidden_size

    @property
    def uses_whole_image(self) -> bool:
        """True if the encoder expects the whole image as region 0 of each image."""
        return self.config.uses_whole_image

    @property
    def whole_image_is_region(self) -> bool:
        """True if region 0 is a region like the others for tasks too. False: it only feeds other elements."""
        return self.uses_whole_image

    @property
    def abilities_by_config(self) -> Mapping[Ability, tuple[bool, str]]:
        """What the config decides: is the encoder able to, and what makes it able, such as "with_pooler to true"."""
        return {}

    def lacks(self, ability: Ability) -> str | None:
        """None if the encoder has the ability; else the remedy, such as "set encoder.config.with_pooler to true"."""
        if (decided := self.abilities_by_config.get(ability)) is not None:
            is_able, setting = decided
            return None if is_able else f"set encoder.config.{setting}"
        return None if ability in self.abilities else "choose another encoder.name"

    def require(self, ability: Ability, who: str) -> None:
        """Refuse an encoder that lacks the ability that `who` needs, with the remedy."""
        if (remedy := self.lacks(ability)) is not None:
            raise UserError(f"{who} needs an encoder with {ability.value}; {remedy}.")

    def recompute_activations(self) -> None:
        """Keep fewer activations for the backward pass and compute them again, if the encoder is made for it."""
        if self.supports_gradient_checkpointing:
            # transformers' newer name, and the older one, of which newer versions warn
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            getattr(self, next(name for name in names if hasattr(self, name)))({"use_reentrant": False})

    @property
    def num_joint_layers(self) -> int:
        """Layers in which words and regions read each other."""
        return self.config.num_hidden_layers

    @property
    def attention_graphs(self) -> Mapping[str, AttentionGraph]:
        """Name -> the attention maps of a stack of layers; none for an encoder that gives no maps."""
        return {}

    def forward(
        self,
        texts: TextBatch,
        regions: TextRegions,
        output_attentions: bool = False,
        intermediate_layer: int | None = None,
    ) -> EncoderOutput:
        """Encode M texts together with their regions; vectors are zero at padding.

        With `output_attentions` the output has the attention maps too, and with `intermediate_layer` the states after
        so many of the `num_joint_layers` (0: before the first).
        """
        raise NotImplementedError

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Start values of a module's own parameters; those that a checkpoint has loaded stay as they are."""
        if isinstance(module, self.own_start):
            module.reset_parameters()
        else:
            super()._init_weights(module)


def read_summary(
    text: Float[Tensor, "M L E"], pooled: Float[Tensor, "M E"] | None, place: Int64[Tensor, " M"] | None
) -> Float[Tensor, "M E"] | None:
    """The state of a wordpiece at `place` (`TextBatch.summary`), or without a place the pooled vector, if any."""
    return pooled if place is None else text[torch.arange(len(place), device=place.device), place]


# No encoder: regions go to the task as the detector describes them, and words are not read.


class NoEncoderConfig(EncoderConfig, settings=NoEncoderSettings):
    """Nothing to choose."""

    model_type = "no_encoder"


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
