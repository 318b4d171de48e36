"""Base classes of the vision-and-language encoders. Shape legend: see `e2e_vl/structures.py`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
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
from typing_extensions import override

from detector.errors import UserError
from e2e_vl.encoders.config import NoEncoderConfig
from e2e_vl.encoders.layers import GEOMETRY_LAYERS, ProposalEmbedding
from e2e_vl.registry import Config, decode
from e2e_vl.structures import Ability, AttentionGraph, EncoderOutput, TextBatch, TextRegions
from e2e_vl.text import TextLayout


class PretrainedEncoderConfig(PreTrainedConfig):
    """The transformers config of an encoder, with the fields of a settings Struct and the two fields below.

    A subclass passes the Struct as an argument: `class MyConfig(PretrainedEncoderConfig, settings=MySettings)`.
    """

    settings_class: ClassVar[type[Config]]
    vocab_size: int = 30522
    feature_dim: int = 2048  # width of the detector's region features

    def __init_subclass__(cls, settings: type[Config], **kwargs: Any) -> None:
        """Copy the fields of the settings to the class: transformers makes a dataclass of its annotations."""
        cls.settings_class = settings
        cls.__annotations__ = inspect.get_annotations(cls)
        for field in msgspec.structs.fields(settings):
            cls.__annotations__[field.name] = field.type
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = dataclasses.field(default_factory=field.default_factory)
            setattr(cls, field.name, default)
        super().__init_subclass__(**kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        values = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(self.settings_class)}
        decode(values, self.settings_class, type(self).__name__)


class Encoder(PreTrainedModel):
    """Encodes texts and regions into one vector per wordpiece, one per region and a summary.

    A subclass sets `config_class`, its text layout and its abilities. The config must have the fields `hidden_size`
    and `uses_whole_image`. `save_pretrained` and `from_pretrained` come from transformers.
    """

    layout: ClassVar[TextLayout] = TextLayout()
    abilities: ClassVar[frozenset[Ability]] = frozenset()  # abilities with any config
    # whether it has parameters without a gradient where a task does not read all of words, regions and summary
    has_optional_outputs: ClassVar[bool] = False
    # names of the modules that turn region features into vectors of its layers, for reports
    region_modules: ClassVar[tuple[str, ...]] = ()
    # attribute of `embeddings` with the word embeddings [V, E]; `get_input_embeddings` returns it
    _input_embed_layer = "word_embeddings"
    # classes of modules that are initialised by their `reset_parameters`
    self_initialized: ClassVar[tuple[type[nn.Module], ...]] = (*GEOMETRY_LAYERS, ProposalEmbedding)

    def __init__(self, config: PretrainedEncoderConfig):
        super().__init__(config)
        self.proposal_embedding = None
        if getattr(config, "proposal_scores", False):
            self.proposal_embedding = ProposalEmbedding(config.feature_dim)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config_class" in vars(cls):  # register with AutoConfig and AutoModel
            AutoConfig.register(cls.config_class.model_type, cls.config_class, exist_ok=True)
            AutoModel.register(cls.config_class, cls, exist_ok=True)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def summary_size(self) -> int:
        """X, the width of the summary; E by default."""
        return self.hidden_size

    @property
    def uses_whole_image(self) -> bool:
        """True if the encoder expects the whole image as region 0 of each image."""
        return self.config.uses_whole_image

    @property
    def whole_image_is_region(self) -> bool:
        """True if tasks also treat the whole image as a region. False: it only contributes to other embeddings."""
        return self.uses_whole_image

    @property
    def abilities_by_config(self) -> Mapping[Ability, tuple[bool, str]]:
        """Abilities that depend on the config -> (is enabled, the setting that enables it: "with_pooler to true")."""
        return {}

    def lacks(self, ability: Ability) -> str | None:
        """Return None if the encoder has the ability, else the remedy: "set encoder.config.with_pooler to true"."""
        by_config = self.abilities_by_config
        if ability in by_config:
            is_enabled, setting = by_config[ability]
            return None if is_enabled else f"set encoder.config.{setting}"
        return None if ability in self.abilities else "choose another encoder.name"

    def require(self, ability: Ability, who: str) -> None:
        """Raise a UserError with the remedy if the encoder lacks an ability that `who` needs."""
        remedy = self.lacks(ability)
        if remedy is not None:
            raise UserError(f"{who} needs an encoder with {ability.value}; {remedy}.")

    @property
    def max_text_length(self) -> int | None:
        """Number of wordpieces, special tokens included, of the longest text that it can encode; None: no limit."""
        return None

    @property
    def reads_proposals(self) -> bool:
        """Whether `forward` reads `TextRegions.proposals`."""
        return self.proposal_embedding is not None

    def with_proposals(self, regions: TextRegions) -> TextRegions:
        """Return the regions with features that say what a proposer says of them, if the encoder reads it."""
        if self.proposal_embedding is None:
            return regions
        added = self.proposal_embedding(regions.proposals.to(self.proposal_embedding.weight.dtype))
        result = dataclasses.replace(regions, features=regions.features + added.to(regions.features.dtype))
        result.lengths = regions.lengths
        return result

    def recompute_activations(self) -> None:
        """Turn on activation checkpointing, if the encoder supports it."""
        if self.supports_gradient_checkpointing:
            # newer versions of transformers warn about the second, older name
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            name = next(name for name in names if hasattr(self, name))
            enable = getattr(self, name)
            enable({"use_reentrant": False})

    @property
    def num_joint_layers(self) -> int:
        """Number of layers in which words and regions attend to each other."""
        return self.config.num_hidden_layers

    @property
    def attention_graphs(self) -> Mapping[str, AttentionGraph]:
        """The attention maps of each stack of layers, by name; empty for an encoder without maps."""
        return {}

    def forward(
        self,
        texts: TextBatch,
        regions: TextRegions,
        output_attentions: bool = False,
        intermediate_layers: Collection[int] = (),
    ) -> EncoderOutput:
        """Encode M texts together with their regions; vectors are zero at padding.

        Args:
            output_attentions: also return the attention maps.
            intermediate_layers: also return the states after these numbers of the `num_joint_layers`; 0: before the
                first.
        """
        raise NotImplementedError

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module's parameters, except those loaded from a checkpoint."""
        if isinstance(module, self.self_initialized):
            module.reset_parameters()
        else:
            super()._init_weights(module)


def read_summary(
    text: Float[Tensor, "M L E"], pooled: Float[Tensor, "M E"] | None, position: Int64[Tensor, " M"] | None
) -> Float[Tensor, "M E"] | None:
    """Return the state of the wordpiece at `position` (`TextBatch.summary`); without one, the pooled vector."""
    if position is None:
        return pooled
    return text[torch.arange(len(position), device=position.device), position]


# No encoder: tasks get the detector's region features, and texts are ignored


class PretrainedNoEncoderConfig(PretrainedEncoderConfig, settings=NoEncoderConfig):
    """The config of `NoEncoder`."""

    model_type = "no_encoder"


class NoEncoder(Encoder):
    """The identity on regions, without parameters."""

    config_class = PretrainedNoEncoderConfig

    def __init__(self, config: PretrainedNoEncoderConfig):
        super().__init__(config)
        self.post_init()

    @override
    def lacks(self, ability: Ability) -> str | None:
        """Return a remedy for every ability, because it has none."""
        return "this one ignores texts and has no layers, so choose another encoder.name"

    @property
    @override
    def hidden_size(self) -> int:
        """The width of a region feature, which is returned unchanged."""
        return self.config.feature_dim

    @property
    def dtype(self) -> torch.dtype:
        """float32; transformers reads it from the first parameter, and there is none."""
        return torch.float32

    def forward(self, texts: TextBatch, regions: TextRegions, output_attentions: bool = False) -> EncoderOutput:
        """Return regions unchanged, and zeros for words; there are no summary and no attention maps."""
        text = regions.features.new_zeros(*texts.input_ids.shape, self.hidden_size)
        return EncoderOutput(text=text, regions=regions.features)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Save as transformers does, and an empty weights file, which it leaves out if there are no parameters."""
        super().save_pretrained(save_directory, **options)
        save_file({}, Path(save_directory) / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
