"""The interface of a backbone, and its blocks, which can be compiled and whose activations can be recomputed."""

from __future__ import annotations

import abc
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from detector.checkpoint import LoadReport
from detector.config import MapShape
from detector.errors import UserError
from detector.structures import FeatureMaps


class Block(nn.Module):
    """A module that `train.torch_compile` compiles, and whose activations `train.activation_checkpointing` recomputes.

    To make a block of a module of another library, inherit from both: `class Block(backbones.base.Block, CNBlock)`.
    """

    recompute = False  # see `recompute_activations`

    @override
    def __call__(self, *inputs: Any) -> Any:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(super().__call__, *inputs, use_reentrant=False)
        return super().__call__(*inputs)


class LibraryNetwork(abc.ABC):
    """A module around a network of another library, which compiles and recomputes its layers in the library's way."""

    @abc.abstractmethod
    def library_blocks(self) -> list[nn.Module]:
        """Return the modules that `train.torch_compile` compiles."""

    @abc.abstractmethod
    def recompute_library_blocks(self) -> None:
        """Enable activation checkpointing, or raise a UserError if the library has none for this network."""


class Backbone(nn.Module, abc.ABC):
    """Images -> feature maps. It is constructed with a `DetectorConfig`, and states its maps in a `BackboneSpec`."""

    @abc.abstractmethod
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        """Return the maps that `BackboneSpec.maps` names, of H / stride x W / stride cells, rounded up."""

    @abc.abstractmethod
    def freeze_stages(self, count: int) -> None:
        """Freeze the first `count` stages (MODEL.BACKBONE.FREEZE_AT), see `freeze`; the constructor calls this."""

    def load_published_weights(self) -> LoadReport | None:
        """Load the weights that the network's own settings name; None: they name none."""
        return None


def check_maps(maps: FeatureMaps, shapes: dict[str, MapShape], pixels: Float[Tensor, "N 3 H W"], name: str) -> None:
    """Raise a UserError if the maps of a padded batch do not have the channels and strides that the spec states.

    The number of cells may be rounded up or down. A program that is compiled or exported contains no check.

    Args:
        name: MODEL.BACKBONE.NAME.
    """
    if torch.compiler.is_compiling():
        return
    height, width = pixels.shape[-2:]
    for map_name, (channels, stride) in shapes.items():
        if map_name not in maps:
            raise UserError(
                f"MODEL.BACKBONE.NAME {name}: its spec states a map {map_name}, but its maps are {', '.join(maps)}."
            )
        actual_channels, rows, columns = maps[map_name].shape[-3:]
        is_stride = abs(rows * stride - height) < stride and abs(columns * stride - width) < stride
        if actual_channels != channels or not is_stride:
            raise UserError(
                f"MODEL.BACKBONE.NAME {name}: the map {map_name} has {rows} x {columns} cells of {actual_channels} "
                f"channels for an input of {height} x {width} pixels, but its spec says stride {stride} and {channels} "
                "channels."
            )


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks in a module, in the order of its layers."""
    blocks = []
    for child in module.modules():
        if isinstance(child, Block):
            blocks.append(child)
        elif isinstance(child, LibraryNetwork):
            blocks += child.library_blocks()
    return blocks


def blocks_to_compile(detector: nn.Module, backbone: nn.Module) -> list[nn.Module]:
    """Return the blocks of a detector, in its backbone and in the res5 stage of its RoI heads.

    Raises:
        UserError: the backbone has none.
    """
    if not blocks_of(backbone):
        raise UserError(
            f"The backbone {type(backbone).__name__} has no blocks that can be compiled; set train.torch_compile to "
            "false."
        )
    return blocks_of(detector)


def recompute_activations(detector: nn.Module, backbone: nn.Module) -> None:
    """Enable activation checkpointing: store only the input of each block and recompute the rest in backward.

    Raises:
        UserError: the backbone has no blocks, or its norms would count each batch twice.
    """
    if not blocks_of(backbone):
        raise UserError(
            f"The backbone {type(backbone).__name__} has no blocks whose activations can be recomputed; set "
            "train.activation_checkpointing to false."
        )
    for block in blocks_of(detector):
        if any(isinstance(norm, nn.BatchNorm2d) for norm in block.modules()):
            raise UserError(
                "Activation checkpointing would update the running statistics of batch norms twice per batch; set "
                "MODEL.RESNETS.NORM to FrozenBN or GN, or disable train.activation_checkpointing."
            )
    for module in detector.modules():
        if isinstance(module, LibraryNetwork):
            module.recompute_library_blocks()
        elif isinstance(module, Block):
            module.recompute = True
