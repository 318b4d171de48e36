"""Backbones of transformers: any network that its `AutoBackbone` makes. Shape legend: see `detector/structures.py`.

This module is imported only for a detector that has such a backbone, because importing transformers takes seconds.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_BACKBONE_MAPPING,
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    TimmBackbone,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import override

from detector.backbones.base import Backbone, LibraryNetwork
from detector.backbones.fpn import FPN, Pyramid
from detector.backbones.layers import ConvNorm, freeze, freeze_norms, make_norm
from detector.checkpoint import LoadReport, load_weights
from detector.config import STRIDES, DetectorConfig, MapShape, ResNetConfig
from detector.errors import MissingFileError, MissingPackageError, UserError, first_line
from detector.structures import FeatureMaps

NETWORK_NAME = "MODEL.TRANSFORMERS_BACKBONE.NAME"
NETWORK_CONFIG = "MODEL.TRANSFORMERS_BACKBONE.CONFIG"
INPUT_KEYS = ("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD")
FOLLOWED = ("norm", "freeze_at", "out_features")  # fields of `ResNetConfig`
SIDE = 896  # pixels of the image of which the maps are measured: a multiple of 64, and of patches of 14
TIMM = "timm/"  # begins the names of networks of timm on the hub
QUARTERS = 4  # of a network's stages or layers, which FREEZE_AT counts after the stem
# keys of a configuration that say nothing of the network's layers, or that the detector sets
UNREAD = (
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "out_features",
    "out_indices",
    "stage_names",
    "torch_dtype",
    "transformers_version",
)


# Settings


def complete_settings(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a detector's config with what the network states itself.

    NETWORK_CONFIG becomes the whole configuration of the network, so that a saved detector needs no hub. INPUT_KEYS get
    the values of the network's image processor.

    Raises:
        MissingFileError: there is no such network, or the hub cannot be reached.
        UserError: the settings contradict each other, or are not all there.
    """
    name = flat.get(NETWORK_NAME, "")
    changes = flat.get(NETWORK_CONFIG) or {}
    if "model_type" in changes:
        network_config = make_config(changes)
        input_settings = {}
    elif name:
        network_config = make_config(read_config(name) | changes)
        input_settings = read_input_settings(name)
    else:
        raise UserError(
            f"{NETWORK_NAME} needs the name of a network, or {NETWORK_CONFIG} the model_type of a random one."
        )
    for key in INPUT_KEYS:
        if key not in flat and key not in input_settings:
            network = name or network_config.model_type
            raise UserError(f"{key} must be stated, because no image processor of {network} was found.")
    for key, value in input_settings.items():
        if key in flat and not _are_close(flat[key], value):
            raise UserError(f"{key} {flat[key]} is not that of {name}, whose image processor has {value}; remove it.")
    return {**flat, **input_settings, NETWORK_CONFIG: _to_settings(network_config)}


def _are_close(stated: Any, value: Any) -> bool:
    if isinstance(value, str) or not isinstance(stated, list | tuple):
        return stated == value
    return all(math.isclose(first, second, abs_tol=0.01) for first, second in zip(stated, value, strict=True))


def _to_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a configuration that determine the network, with its `model_type`."""
    known = type(config)().to_dict().keys() - {*UNREAD}
    settings = {key: value for key, value in config.to_diff_dict().items() if key in known}
    return {**settings, "model_type": config.model_type}


def make_config(settings: dict[str, Any]) -> PreTrainedConfig:
    """Make the configuration of a network from its `model_type` and its other settings.

    Raises:
        UserError: transformers has no backbone of this type, or its configuration refuses the settings.
    """
    model_type = settings["model_type"]
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_BACKBONE_MAPPING:
        raise UserError(f"{NETWORK_CONFIG}: transformers has no backbone of the model_type {model_type!r}.")
    config_class = CONFIG_MAPPING[model_type]
    known = config_class().to_dict().keys() - {*UNREAD}
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise UserError(f"{NETWORK_CONFIG}: {key} is not a setting of {model_type} here.{hint}")
    try:
        return config_class(**{key: value for key, value in settings.items() if key != "model_type"})
    except Exception as error:  # each configuration has checks of its own
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{NETWORK_CONFIG}: {model_type} refuses its settings ({reason}).") from error


def read_config(name: str) -> dict[str, Any]:
    """Read the configuration of a network on the hub or in a folder; of a network of timm, it has only the name."""
    if name.startswith(TIMM):
        return {"model_type": TimmBackbone.config_class.model_type, "backbone": name.removeprefix(TIMM)}
    try:
        return _to_settings(AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise _unreachable(name, error) from error


def read_input_settings(name: str) -> dict[str, Any]:
    """Return the keys of a detector's config that the image processor of a network states; none if it has none.

    An image processor multiplies pixels by `rescale_factor` before it normalises them.
    """
    if name.startswith(TIMM):
        return _read_timm_settings(name.removeprefix(TIMM))
    try:
        processor = AutoImageProcessor.from_pretrained(name)
    except (OSError, ValueError):  # `read_config` has reached the network
        return {}
    factor = processor.rescale_factor if processor.do_rescale else 1.0
    mean = [0.0, 0.0, 0.0]
    std = [1.0, 1.0, 1.0]
    if processor.do_normalize:
        mean = processor.image_mean
        std = processor.image_std
    is_flipped = getattr(processor, "do_flip_channel_order", False)
    return {
        "INPUT.FORMAT": "BGR" if is_flipped else "RGB",
        "MODEL.PIXEL_MEAN": [value / factor for value in mean],
        "MODEL.PIXEL_STD": [value / factor for value in std],
    }


def _read_timm_settings(name: str) -> dict[str, Any]:
    """Return what timm itself states of the pixels of a network."""
    import timm  # optional

    settings = timm.get_pretrained_cfg(name)
    if settings is None:
        return {}
    return {
        "INPUT.FORMAT": "RGB",
        "MODEL.PIXEL_MEAN": [value * 255 for value in settings.mean],
        "MODEL.PIXEL_STD": [value * 255 for value in settings.std],
    }


def _unreachable(name: str, error: Exception) -> MissingFileError:
    return MissingFileError(
        f"{NETWORK_NAME} {name} is neither a local folder of a network nor one that could be loaded from the hub "
        f"({first_line(error).rstrip('.')}); check the name and the connection, or download it and give its folder."
    )


def check_settings(config: DetectorConfig, outline: NetworkOutline) -> None:
    """Raise a UserError for settings of a ResNet that a network cannot follow."""
    for setting in msgspec.structs.fields(ResNetConfig):
        if setting.name not in FOLLOWED and getattr(config.resnet, setting.name) != setting.default:
            raise UserError(f"{setting.encode_name} does not fit MODEL.BACKBONE.NAME {config.backbone}; remove it.")
    model_type = config.transformers.config["model_type"]
    if config.resnet.norm != "FrozenBN" and not outline.has_batch_norm:
        raise UserError(f"MODEL.RESNETS.NORM {config.resnet.norm}: {model_type} has no batch norm; remove the key.")
    freeze_at = config.resnet.freeze_at
    if 0 < freeze_at <= QUARTERS and not outline.has_stages:
        raise UserError(
            f"MODEL.BACKBONE.FREEZE_AT {freeze_at}: the stages of {model_type} are not known; set it to 0, or "
            "to 5 for all of them."
        )
    if freeze_at == 1 and not outline.has_stem:
        raise UserError(
            f"MODEL.BACKBONE.FREEZE_AT 1: the stem of {model_type} is part of its first stage; set it to 0 or 2."
        )


# What is known of a network without its weights


class NetworkOutline(NamedTuple):
    """What a network is like, measured on tensors without values."""

    maps: dict[str, MapShape]  # by the names in STRIDES, finest first; of a ViT, its last map only
    stages: dict[str, int]  # name of a map -> transformers' index of the stage that it is the output of
    is_plain: bool  # all maps have one stride, as in a ViT
    input_scale: float  # the network gets images resized by this factor: 14 / 16 for patches of 14 pixels
    has_batch_norm: bool
    has_stages: bool  # that can be frozen one by one
    has_stem: bool  # outside of the stages


def measure(settings: dict[str, Any] | None) -> NetworkOutline:
    """Measure a network with these settings, see `make_config`."""
    if not settings:
        raise UserError(f"{NETWORK_CONFIG} is missing; read the detector's config with DetectorConfig.from_yaml.")
    return _measure(json.dumps(settings, sort_keys=True))


@functools.cache
def _measure(settings: str) -> NetworkOutline:
    names = make_bare_network(settings).stage_names
    indices = tuple(index for index, name in enumerate(names) if name != "stem")
    network = make_bare_network(settings, indices)
    shapes = _map_shapes(network, SIDE, SIDE)
    strides = [SIDE / columns for _, _, _, columns in shapes]
    is_plain = len({*strides}) == 1
    input_scale = 1.0
    if is_plain:
        patch = strides[-1]
        stride = 2 ** round(math.log2(patch))
        input_scale = patch / stride
        strides = [float(stride)] * len(strides)
    maps = {}
    stages = {}
    for map_name, stride in STRIDES.items():
        if stride in strides:
            last = len(strides) - 1 - strides[::-1].index(stride)
            maps[map_name] = MapShape(shapes[last][1], stride)
            stages[map_name] = indices[last]
    if not maps:
        usable = ", ".join(map(str, STRIDES.values()))
        raise UserError(f"{NETWORK_CONFIG}: the maps of {network.config.model_type} have none of the strides {usable}.")
    side = round(max(shape.stride for shape in maps.values()) * input_scale)
    _map_shapes(network, 3 * side, 5 * side)  # any multiple must do
    return NetworkOutline(
        maps,
        stages,
        is_plain,
        input_scale,
        has_batch_norm=any(isinstance(module, nn.BatchNorm2d) for module in network.modules()),
        has_stages=bool(stages_of(network)),
        has_stem=bool(stem_of(network)),
    )


def _map_shapes(network: PreTrainedModel, height: int, width: int) -> list[tuple[int, int, int, int]]:
    """Return the shapes of the maps that a network of tensors without values gives of an image."""
    shapes = []
    try:
        for feature_map in network(torch.empty(1, 3, height, width, device="meta")).feature_maps:
            batch, channels, rows, columns = feature_map.shape
            shapes.append((batch, channels, rows, columns))
    except Exception as error:  # a network refuses a size in a way of its own
        raise UserError(
            f"{NETWORK_CONFIG}: {network.config.model_type} gives no maps of images of any size ({first_line(error)})."
        ) from error
    return shapes


def make_network(settings: str, stages: tuple[int, ...] = ()) -> PreTrainedModel:
    """Make a random network that gives the maps of these stages.

    Args:
        settings: JSON, see `make_config`.
        stages: transformers' indices, in the order of the layers; by default, only the last one.
    """
    config = make_config(json.loads(settings))
    if stages:
        config.out_indices = list(stages)
    try:
        return AutoBackbone.from_config(config)
    except ImportError as error:
        reason = first_line(error).partition(".")[0]
        raise MissingPackageError(f"{NETWORK_CONFIG}: {reason}; install it.") from error


def make_bare_network(settings: str, stages: tuple[int, ...] = ()) -> PreTrainedModel:
    """Make a network of tensors without values; no random number is drawn."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return make_network(settings, stages).eval()


@functools.cache
def unused_parameters(settings: str, stages: tuple[int, ...]) -> frozenset[str]:
    """Return the names of the parameters that the maps of these stages do not depend on, such as mask tokens."""
    network = make_bare_network(settings, stages)
    parameters = dict(network.named_parameters())
    maps = network(torch.empty(1, 3, SIDE, SIDE, device="meta")).feature_maps
    total = sum(feature_map.sum() for feature_map in maps)
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None)


def stages_of(network: PreTrainedModel) -> list[nn.Module]:
    """Return the stages of a network, or the layers of a ViT: the first list of modules in it; none for timm's."""
    if isinstance(network, TimmBackbone):
        return []
    return list(next(module for module in network.modules() if isinstance(module, nn.ModuleList)))


def stem_of(network: PreTrainedModel) -> list[nn.Module]:
    """Return the embeddings before the first stage, with parameters; none if they are part of the stage."""
    in_stages: set[nn.Module] = set()
    for stage in stages_of(network):
        in_stages.update(stage.modules())
    modules = []
    for name, module in network.named_modules():
        is_stem = name.rpartition(".")[2].startswith(("embed", "stem"))
        if is_stem and module not in in_stages and any(True for _ in module.parameters()):
            modules.append(module)
    return modules


# The networks


class TransformersBackbone(Backbone, LibraryNetwork):
    """A network of transformers with random weights, see `load_published_weights`. Keys are `network.*`.

    MODEL.RESNETS.NORM: FrozenBN fixes its batch norms, if it has any, and BN trains them. FREEZE_AT 1 freezes the stem
    (the patch embeddings of a ViT), 2 also the first stage (the first quarter of a ViT's layers), 5 the whole network.
    Parameters that no map depends on are frozen, because all others must get a gradient in each step. Stages after the
    last map are computed, too.
    """

    def __init__(self, config: DetectorConfig, map_names: tuple[str, ...] | None = None) -> None:
        """Make the network; it gives the maps `map_names`, by default those of MODEL.RESNETS.OUT_FEATURES."""
        super().__init__()
        outline = measure(config.transformers.config)
        settings = json.dumps(config.transformers.config, sort_keys=True)
        self.published_name = config.transformers.name
        self.map_names = [name for name in outline.maps if name in (map_names or config.resnet.out_features)]
        self.input_scale = outline.input_scale
        stages = tuple(outline.stages[name] for name in self.map_names)
        self.network = make_network(settings, stages)
        unused = unused_parameters(settings, stages)
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name not in unused)
        if config.resnet.norm == "FrozenBN":
            self._freeze_norms()
        self.freeze_stages(config.resnet.freeze_at)

    @override
    def freeze_stages(self, count: int) -> None:
        if count == 0:
            return
        stages = stages_of(self.network)
        stages = stages[: len(stages) * (count - 1) // QUARTERS]
        for module in (*stem_of(self.network), *stages):
            freeze(module)
        if count > QUARTERS:
            self._freeze_norms()
            self.network.requires_grad_(False)

    def _freeze_norms(self) -> None:
        """Fix the batch norms; those of timm may contain an activation, which timm's own function keeps."""
        if isinstance(self.network, TimmBackbone):
            self.network.freeze_batch_norm_2d()
        else:
            freeze_norms(self.network)

    @override
    def library_blocks(self) -> list[nn.Module]:
        """Return transformers' layers, or, where it does not mark them, the stages or the whole network."""
        layers = []
        for module in self.network.modules():
            marked = [child for child in module.modules() if isinstance(child, GradientCheckpointingLayer)]
            if marked == [module]:
                layers.append(module)
        return layers or stages_of(self.network) or [self.network]

    @override
    def recompute_library_blocks(self) -> None:
        is_marked = any(isinstance(module, GradientCheckpointingLayer) for module in self.network.modules())
        if not self.network.supports_gradient_checkpointing or not is_marked:
            raise UserError(
                f"transformers has no activation checkpointing for {self.network.config.model_type}; set "
                "train.activation_checkpointing to false."
            )
        # newer versions of transformers warn about the second, older name
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        name = next(name for name in names if hasattr(self.network, name))
        enable = getattr(self.network, name)
        enable({"use_reentrant": False})

    @override
    def load_published_weights(self) -> LoadReport | None:
        """Load the weights of MODEL.TRANSFORMERS_BACKBONE.NAME.

        Only the norms that transformers adds after the stages of a classifier may be missing.

        Raises:
            MissingFileError: there are none, or the hub cannot be reached.
            UserError: they do not fit the network.
        """
        name = self.published_name
        if not name:
            return None
        missing: list[str] = []
        try:
            if isinstance(self.network, TimmBackbone):
                stages = self.network.config.out_indices
                published = TimmBackbone.from_pretrained(name.removeprefix(TIMM), out_indices=stages)
            else:
                published, info = type(self.network).from_pretrained(
                    name, config=self.network.config, output_loading_info=True, dtype=torch.float32
                )
                missing = info["missing_keys"]
        except (OSError, ValueError) as error:
            raise _unreachable(name, error) from error
        except RuntimeError as error:  # weights of other shapes
            raise UserError(f"{name} does not fit {NETWORK_CONFIG} ({first_line(error)}).") from error
        tensors = {key: value for key, value in published.state_dict().items() if key not in missing}
        return load_weights(self.network, tensors, name, allow_missing=("hidden_states_norms.",), layout="transformers")

    @override
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        if self.input_scale != 1:
            height, width = pixels.shape[-2:]
            size = (round(height * self.input_scale), round(width * self.input_scale))
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        return dict(zip(self.map_names, self.network(pixels).feature_maps, strict=True))


class SimpleFeaturePyramid(Pyramid):
    """Simple feature pyramid on the last map of a ViT (Li et al., ECCV 2022, "ViTDet", section 3): p2 .. p5, and p6.

    A level is the map after deconvolutions (stride 2, half the channels) or a max pool, then a 1x1 and a 3x3
    convolution. As in Detectron2, keys are `simfp_2.*`, ..., and p6 is a max pool of p5. MODEL.FPN.NORM is the norm of
    the convolutions (ViTDet: LN).
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        [self.input_map] = measure(config.transformers.config).maps
        [shape] = measure(config.transformers.config).maps.values()
        self.bottom_up = TransformersBackbone(config, (self.input_map,))
        self.out_features = tuple(config.map_shapes)
        width = config.fpn.out_channels
        norm = config.fpn.norm
        for level in self.out_features[:-1]:
            stride = config.map_shapes[level].stride
            layers = _scale_map(shape, stride)
            channels = max(shape.channels * min(stride, shape.stride) // shape.stride, 1)
            lateral = ConvNorm(channels, width, 1, norm=norm)
            output = ConvNorm(width, width, 3, norm=norm, padding=1)
            self.add_module(f"simfp_{level[1:]}", nn.Sequential(*layers, lateral, output))

    @override
    def forward(self, pixels: Float[Tensor, "N 3 H W"]) -> FeatureMaps:
        """Return all levels, finest first. H and W must be multiples of the stride of p5."""
        x = self.bottom_up(pixels)[self.input_map]
        maps = {level: getattr(self, f"simfp_{level[1:]}")(x) for level in self.out_features[:-1]}
        coarsest = maps[self.out_features[-2]]
        maps[self.out_features[-1]] = F.max_pool2d(coarsest, kernel_size=1, stride=2)
        return maps


def _scale_map(shape: MapShape, stride: int) -> list[nn.Module]:
    """Make the layers that change the stride of a map; there is a norm and a GELU between two deconvolutions."""
    if stride > shape.stride:
        factor = stride // shape.stride
        return [nn.MaxPool2d(factor, factor)]
    layers: list[nn.Module] = []
    channels = shape.channels
    for number in range(round(math.log2(shape.stride // stride))):
        if number > 0:
            layers += [make_norm("LN", channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        channels //= 2
    return layers


def build_pyramid(config: DetectorConfig) -> Backbone:
    """Build a feature pyramid on a network, or a simple feature pyramid if it is a ViT."""
    outline = measure(config.transformers.config)
    if outline.is_plain:
        return SimpleFeaturePyramid(config)
    return FPN(config, TransformersBackbone(config, config.fpn.in_features), outline.maps)
