"""Training steps of the official VL-BERT code on RefCOCO+, from a checkout of github.com/jackroos/VL-BERT.

The model has the settings of its config and random weights. In place of what does not come with the checkout stand:
torchvision's RoIAlign with the same arithmetic (`aligned=False`, one sample per cell), a tokenizer that only knows its
special words, a dict with attributes for easydict, and empty modules for those that download.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn
from torchvision.ops import roi_align

from detector.errors import MissingFileError
from e2e_vl.structures import Batch

CONFIG = "cfgs/refcoco/base_detected_regions_4x16G.yaml"
SPECIAL_WORDS = {"[CLS]": 101, "[SEP]": 102}
_PACKAGES = ("common", "external", "refcoco")


class AttributeDict(dict):
    """A dict whose keys are attributes, as are those of dicts inside."""

    def __init__(self, values: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        for key, value in values.items():
            self[key] = AttributeDict(value) if isinstance(value, dict) else value

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class _Tokenizer:
    def convert_tokens_to_ids(self, words: list[str]) -> list[int]:
        return [SPECIAL_WORDS[word] for word in words]


class OfficialTrainer:
    """Trains the official model with torch's AdamW and clipped gradients.

    Args:
        checkout: the official code.
        autocast: the precision of the forward pass.
    """

    def __init__(self, checkout: Path, device: torch.device, autocast: torch.autocast) -> None:
        self.model = build_official_model(checkout).to(device)
        self.model.train()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        self.autocast = autocast
        self.device = device

    def train_step(self, batches: list[Batch]) -> None:
        """Update the weights once; each batch has one expression per image, and is a pass of its own."""
        for batch in batches:
            with self.autocast:
                _, loss = self.model(*official_inputs(batch, self.device))
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def official_inputs(batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
    """Return the inputs of the official model, with arbitrary pixels and labels.

    Returns:
        The image, float32 [N, 3, H, W]; boxes, float32 [N, R + 1, 4], with the whole image first, padded with -2; image
        sizes, float32 [N, 4] (width, height, and the scales of both); wordpieces without special ones, int64 [N, L],
        padded with 0; and labels of the boxes, float32 [N, R + 1], padded with -1.
    """
    images = torch.randn(batch.images.pixels.shape, device=device)
    rows = []
    for boxes, size in zip(batch.boxes, batch.images.sizes, strict=True):
        height, width = size.tolist()
        whole = boxes.new_tensor([[0.0, 0.0, width - 1, height - 1]])
        rows.append(torch.cat([whole, boxes]))
    boxes = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-2.0).to(device)
    labels = torch.where(boxes[:, :, 0] > -1.5, 0.0, -1.0)
    labels[:, 1] = 1.0
    ones = torch.ones(len(rows), 2)
    sizes = torch.cat([batch.images.sizes.flip(1).float().cpu(), ones], dim=1).to(device)
    words = batch.texts.input_ids[:, 1:-1].clone()  # about as many as between the first and the last special one
    words[~batch.texts.attention_mask[:, 2:]] = 0
    return images, boxes, sizes, words.to(device), labels


def build_official_model(checkout: Path) -> nn.Module:
    """Build the official model of RefCOCO+ (BASE, ResNet-101) with random weights."""
    if not (checkout / CONFIG).is_file():
        raise MissingFileError(f"{checkout / CONFIG} does not exist; clone github.com/jackroos/VL-BERT there")
    with _importing(checkout):
        settings = importlib.import_module("refcoco.function.config")
        module = importlib.import_module("refcoco.modules.resnet_vlbert_for_refcoco")
        roi_module = importlib.import_module("common.lib.roi_pooling.roi_align")
        resnet = importlib.import_module("common.backbone.resnet.resnet")
        roi_module.roi_align = lambda *inputs: roi_align(*inputs, aligned=False)
        with (
            mock.patch.object(yaml, "load", functools.partial(yaml.load, Loader=yaml.SafeLoader)),
            mock.patch.object(module.BertTokenizer, "from_pretrained", lambda name: _Tokenizer()),
            mock.patch.object(resnet.model_zoo, "load_url", lambda address: {}),
            mock.patch.object(resnet.ResNet, "load_pretrained_state_dict", lambda model, state: None),
            mock.patch.object(module.FastRCNN, "init_weight", lambda model: None),
        ):
            settings.update_config(str(checkout / CONFIG))
            settings.config.NETWORK.IMAGE_PRETRAINED = ""
            return module.ResNetVLBERT(settings.config)


@contextlib.contextmanager
def _importing(checkout: Path) -> Iterator[None]:
    """Make the official packages importable for a while."""
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in ("boto3", "botocore", "botocore.exceptions")}
    modules["botocore.exceptions"].ClientError = OSError
    modules["easydict"] = types.ModuleType("easydict")
    modules["easydict"].EasyDict = AttributeDict
    modules["common.lib.roi_pooling.C_ROIPooling"] = types.ModuleType("C_ROIPooling")
    with mock.patch.dict(sys.modules, modules), mock.patch.object(sys, "path", [str(checkout), *sys.path]):
        yield
