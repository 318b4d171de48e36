"""ResNets, normalisation layers and feature pyramids; batch norm is the same on two processes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from detector.backbones.base import blocks_to_compile, recompute_activations
from detector.backbones.fpn import FPN, ResNetFPN
from detector.backbones.layers import (
    AffineCache,
    ConvNorm,
    FoldAndCast,
    FrozenBatchNorm2d,
    SyncBatchNorm,
    freeze,
    make_norm,
)
from detector.backbones.resnet import Res5, ResNet
from detector.config import BACKBONES, BackboneEntry, DetectorConfig, MapShape, ResNetConfig, ResNetSpec
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.roi_pooler import align_rois
from detector.structures import ImageBatch
from detector.yaml_tree import flatten
from tests.detector import published

TINY = ResNetConfig(depth=18, norm="BN", width_per_group=4, stem_out_channels=8, res2_out_channels=16, freeze_at=0)


def tiny(**changes) -> ResNetConfig:
    return structs.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("norm", "pool", "cells"),
    [("FrozenBN", "max", (5, 7)), ("BN", "caffe_max", (5, 7)), ("GN", "none", (9, 13)), ("SyncBN", "max", (5, 7))],
)
def test_strides_for_sides_that_are_no_multiple(norm: str, pool: str, cells: tuple[int, int]):
    resnet = tiny(norm=norm, stem_pool=pool, depth=50)
    res4 = ResNet(DetectorConfig(resnet=resnet))(torch.rand(2, 3, 67, 99))["res4"]
    assert tuple(res4.shape) == (2, 64, *cells) and res4.isfinite().all()


@pytest.mark.parametrize("norm", ["FrozenBN", "BN", "GN"])
@pytest.mark.parametrize("in_1x1", [True, False])
@pytest.mark.parametrize("dilation", [1, 2])
def test_convolutions_before_the_pooling_change_nothing(norm: str, in_1x1: bool, dilation: int):
    torch.manual_seed(0)
    res5 = Res5(tiny(norm=norm, stride_in_1x1=in_1x1, res5_dilation=dilation, freeze_at=0)).double()
    for name, tensor in res5.named_buffers():
        if name.endswith(("running_mean", "running_var", "norm.weight", "norm.bias")):
            tensor.uniform_(0.5, 2)
    features = torch.randn(2, 64, 9, 8, dtype=torch.float64, requires_grad=True)
    rois = torch.tensor([[0, 3, 5, 60, 90], [1, -20, 0, 200, 50], [1, 10, 10, 30, 30]], dtype=torch.float64)

    def pool(maps: Tensor, stride: int) -> Tensor:
        return align_rois(maps, rois, 6, 1 / 16, sampling_ratio=0, aligned=True, stride=stride)

    inputs = [features, *res5.parameters()]
    weights = None
    results = []
    for maps in (res5(pool(features, 1)), res5(features, pool)):
        weights = torch.randn_like(maps) if weights is None else weights
        results.append((maps, *torch.autograd.grad(maps, inputs, weights)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_affine_map_of_a_frozen_norm_follows_loaded_weights_and_the_dtype():
    conv, other = (ConvNorm(2, 3, 1, norm="FrozenBN") for _ in range(2))
    nn.init.uniform_(other.norm.weight)
    nn.init.uniform_(other.norm.running_mean)
    image = torch.rand(1, 2, 4, 4)
    with torch.inference_mode():
        conv(image)
    conv(image).sum().backward()  # what inference mode has kept serves training
    conv.load_state_dict(other.state_dict())
    torch.testing.assert_close(conv(image), other(image))
    torch.testing.assert_close(conv.double()(image.double()).float(), other(image))


def _replace_weight(conv: ConvNorm) -> None:
    conv.weight = nn.Parameter(2 * conv.weight.detach(), requires_grad=False)


def _assign_data(conv: ConvNorm) -> None:
    conv.weight.data = 2 * conv.weight.data


def _replace_buffer(conv: ConvNorm) -> None:
    conv.norm.weight = 2 * conv.norm.weight


def _load_norm(conv: ConvNorm) -> None:
    state = conv.norm.state_dict()
    conv.norm.load_state_dict({**state, "weight": 2 * state["weight"]})


def _thaw_and_edit(conv: ConvNorm) -> None:
    conv.requires_grad_(True)(torch.rand(1, 2, 4, 4)).sum().backward()
    with torch.no_grad():
        conv.weight.mul_(2)
    conv.requires_grad_(False)


DOUBLINGS = {  # edits of a convolution without a bias, after which its output is twice as large
    "copy_": lambda conv: conv.weight.copy_(2 * conv.weight),
    ".data in place": lambda conv: conv.weight.data.mul_(2),
    ".data assigned": _assign_data,
    "new parameter": _replace_weight,
    "buffer in place": lambda conv: conv.norm.weight.mul_(2),
    "buffer's .data": lambda conv: conv.norm.weight.data.mul_(2),
    "new buffer": _replace_buffer,
    "norm.load_state_dict": _load_norm,
    "load_state_dict": lambda conv: conv.load_state_dict({**conv.state_dict(), "weight": 2 * conv.weight}),
    "thawed, edited, frozen": _thaw_and_edit,
}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edit", DOUBLINGS.values(), ids=DOUBLINGS)
def test_a_frozen_convolution_follows_every_edit_of_its_weight_and_norm(edit, precision):
    conv, image = ConvNorm(2, 3, 1, norm="FrozenBN").requires_grad_(False), torch.rand(1, 2, 4, 4)
    with torch.autocast("cpu", precision, enabled=precision is torch.bfloat16):
        before = conv(image)
        edit(conv)
        assert torch.equal(conv(image), 2 * before)


def test_a_frozen_convolution_follows_functional_call():
    conv, image = ConvNorm(2, 3, 1, norm="FrozenBN").requires_grad_(False), torch.rand(1, 2, 4, 4)
    before = conv(image)
    assert torch.equal(torch.func.functional_call(conv, {"weight": 2 * conv.weight}, image), 2 * before)
    assert torch.equal(torch.func.functional_call(conv, {"norm.weight": 2 * conv.norm.weight}, image), 2 * before)
    assert torch.equal(conv(image), before)


def _assign_buffer_data(norm: nn.Module) -> None:
    norm.weight.data = 2 * norm.weight.data


def _new_buffer(norm: nn.Module) -> None:
    norm.weight = 2 * norm.weight


NORM_DOUBLINGS = {
    "in place": lambda norm: norm.weight.mul_(2),
    ".data assigned": _assign_buffer_data,
    "new buffer": _new_buffer,
    "load_state_dict": lambda norm: norm.load_state_dict({**norm.state_dict(), "weight": 2 * norm.weight}),
}


@pytest.mark.parametrize("edit", NORM_DOUBLINGS.values(), ids=NORM_DOUBLINGS)
def test_the_cached_map_of_a_norm_follows_its_buffers(edit):
    norm, cache = make_norm("FrozenBN", 3), AffineCache()
    with torch.inference_mode():
        before = cache.affine(norm, torch.float32)
    assert cache.affine(norm, torch.float32) is before
    assert not before.scale.is_inference()  # it serves training too
    edit(norm)
    torch.testing.assert_close(cache.affine(norm, torch.float32).scale, 2 * before.scale)
    assert cache.affine(norm, torch.bfloat16).cast_bias.dtype is torch.bfloat16


def test_the_cached_map_follows_epsilon_and_passes_gradients():
    norm, cache = make_norm("FrozenBN", 3), AffineCache()
    cache.affine(norm, torch.float32)
    norm.eps += 3.0
    torch.testing.assert_close(cache.affine(norm, torch.float32).scale, torch.full((3,), 0.5))

    def total(weight: torch.Tensor) -> torch.Tensor:
        norm.weight = weight
        return cache.affine(norm, torch.float32).scale.sum()

    weight = torch.ones(3)
    torch.testing.assert_close(torch.func.grad(total)(weight), torch.full((3,), 0.5))
    torch.testing.assert_close(torch.func.vmap(total)(torch.eye(3)), torch.full((3,), 0.5))
    total(weight)
    for _ in range(2):
        total(weight.requires_grad_()).backward()
    torch.testing.assert_close(weight.grad, torch.ones(3))


def test_a_saved_or_copied_cache_is_empty():
    norm, cache = make_norm("FrozenBN", 3), AffineCache()
    before = cache.affine(norm, torch.float32)
    assert copy.deepcopy(cache).affine(norm, torch.float32) is not before
    assert len(pickle.dumps(cache)) < 200


def test_weights_folded_and_cast_in_one_kernel_are_those_of_two():
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    scale = torch.rand(4)[:, None, None, None]
    folded = FoldAndCast.apply(weight, scale, torch.bfloat16)
    expected = (weight * scale).to(torch.bfloat16)
    assert torch.equal(folded, expected)
    assert folded.stride() == expected.stride()
    gradient = torch.randn(4, 3, 3, 3).to(torch.bfloat16)
    results = [torch.autograd.grad(result, weight, gradient)[0] for result in (folded, expected)]
    assert results[0].dtype == torch.float32
    assert torch.equal(*results)


def test_frozen_batch_norms_keep_their_numbers():
    block = nn.Sequential(ConvNorm(3, 4, 1, norm="BN"))
    block[0].norm.running_mean.uniform_(-1, 1)
    block.eval()
    x = torch.rand(2, 3, 5, 5)
    before = block(x)
    freeze(block)
    assert isinstance(block[0].norm, FrozenBatchNorm2d)
    torch.testing.assert_close(block.train()(x), before)


def test_group_norm_of_narrow_layers():
    assert make_norm("GN", 64).num_groups == 32
    assert make_norm("GN", 24).num_groups == 8


def test_recomputed_activations_change_nothing():
    torch.manual_seed(0)
    config = tiny(norm="FrozenBN", depth=50)
    trunk, res5 = ResNet(DetectorConfig(resnet=config)), Res5(config)
    rois = torch.tensor([[0, 3.0, 5, 60, 50], [0, 10, 10, 30, 30]])

    def gradients() -> list[Tensor]:
        features = trunk(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)))["res4"]
        maps = res5(
            features, lambda x, stride: align_rois(x, rois, 6, 1 / 16, sampling_ratio=1, aligned=True, stride=stride)
        )
        return torch.autograd.grad(maps.square().sum(), [*trunk.parameters(), *res5.parameters()])

    before = gradients()
    calls = []
    hook = trunk.res4[0].conv2.register_forward_hook(lambda *_: calls.append(1))
    for module in (trunk, res5):
        recompute_activations(module, module)
    after = gradients()
    hook.remove()
    assert len(calls) == 2  # forward, and again in the backward pass
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="FrozenBN or GN"):
        backbone = ResNet(DetectorConfig(resnet=tiny(norm="BN")))
        recompute_activations(backbone, backbone)


CHANNELS = 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, CHANNELS, 4, 4, generator=generator) * 3 + 1, torch.randn(6, 3, 4, 4, generator=generator)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    inputs, weights = (part.split((2, 4))[rank] for part in data())  # shares of different size
    inputs = inputs.clone().requires_grad_()
    norm = SyncBatchNorm(CHANNELS)
    out = norm(inputs)
    (out * weights).sum().backward()
    torch.distributed.all_reduce(norm.weight.grad)
    result = (out.detach(), inputs.grad, norm.weight.grad, norm.running_mean, norm.running_var)
    torch.save(result, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path):
    torch.multiprocessing.start_processes(work, args=(str(tmp_path),), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))

    inputs, weights = data()
    inputs.requires_grad_()
    norm = nn.BatchNorm2d(CHANNELS)
    out = norm(inputs)
    (out * weights).sum().backward()
    torch.testing.assert_close(torch.cat((first[0], second[0])), out.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat((first[1], second[1])), inputs.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first[2], norm.weight.grad, atol=1e-4, rtol=1e-4)
    for part in (first, second):
        torch.testing.assert_close(part[3], norm.running_mean)
        torch.testing.assert_close(part[4], norm.running_var)


def test_on_a_gpu_the_statistics_are_those_of_torch(monkeypatch):
    """A fake tensor says `cuda`; that torch's kernels agree with ours needs two GPUs."""
    norms = []
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda self, x: norms.append(self) or x)
    norm = SyncBatchNorm(CHANNELS)
    with FakeTensorMode():
        norm(torch.empty(2, CHANNELS, 4, 4, device="cuda"))
    norm(data()[0])
    assert norms == [norm]


def test_on_one_process_torchs_class_gives_the_same():
    """Its `forward` finds all that it reads in ours."""
    norm, other = SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    inputs, _ = data()
    torch.testing.assert_close(nn.SyncBatchNorm.forward(norm, inputs), other(inputs))
    torch.testing.assert_close(norm.state_dict(), other.state_dict())


@pytest.mark.parametrize("use_blocks", [recompute_activations, blocks_to_compile])
def test_a_backbone_without_blocks_is_named(use_blocks):
    backbone = nn.Conv2d(1, 1, 1)
    with pytest.raises(UserError, match="The backbone Conv2d has no blocks"):
        use_blocks(backbone, backbone)


@torch.no_grad()
def test_levels_may_be_averaged():
    """Their sums, p6 and gradients: tests/parity."""
    keys = {"BACKBONE.FREEZE_AT": 0, "RESNETS.DEPTH": 18, "RESNETS.NORM": "GN", "FPN.FUSE_TYPE": "avg"}
    changes = {f"MODEL.{key}": value for key, value in keys.items()}
    model = ResNetFPN(DetectorConfig.from_flat(flatten(published.FPN_TREE) | changes)).eval()
    pixels = torch.randn(1, 3, 64, 96)
    maps, below = model(pixels), model.bottom_up(pixels)
    top = model.fpn_lateral5(below["res5"])
    torch.testing.assert_close(maps["p5"], model.fpn_output5(top))
    larger = top.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    torch.testing.assert_close(maps["p4"], model.fpn_output4((model.fpn_lateral4(below["res4"]) + larger) / 2))


class StatedSpec(ResNetSpec):
    """States what it is given of res4."""

    def __init__(self, **stated: MapShape) -> None:
        self.stated = stated

    def maps(self, config: DetectorConfig) -> dict[str, MapShape]:
        return super().maps(config) | self.stated


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"res4": MapShape(64, 8)}, "res4 has 8 x 8 cells of 64 channels for an input of 128 x 128 .*says stride 8"),
        ({"res4": MapShape(65, 16)}, "res4 has 8 x 8 cells of 64 channels .* its spec says stride 16 and 65 channels"),
        ({"res5": MapShape(64, 32)}, "its spec states a map res5, but its maps are res4"),
    ],
)
def test_maps_that_differ_from_the_spec_are_an_error(monkeypatch, stated: dict[str, MapShape], message: str):
    config = DetectorConfig(resnet=tiny(depth=50))
    entry = BackboneEntry(StatedSpec(**stated), ResNet)
    monkeypatch.setitem(BACKBONES, config.backbone, entry)
    images = ImageBatch(torch.zeros(1, 3, 128, 128), torch.tensor([[128, 128]]), torch.tensor([[128, 128]]), ["image"])
    with pytest.raises(UserError, match=f"MODEL.BACKBONE.NAME {config.backbone}: .*{message}"):
        FasterRCNN(config).features(images)


def test_maps_below_a_pyramid_are_compared_before_it_reads_them():
    config = DetectorConfig.from_flat(flatten(published.FPN_TREE))
    shapes = config.resnet.shapes
    for wrong in (MapShape(shapes["res3"].channels + 1, 8), MapShape(shapes["res3"].channels, 4)):
        model = FPN(config, ResNet(config), shapes | {"res3": wrong})
        with pytest.raises(UserError, match="the map res3 has 8 x 12 cells"):
            model(torch.zeros(1, 3, 64, 96))
