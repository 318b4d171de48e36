"""Mixed precision with few kernel launches: the weights of the encoder's layers are cast together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers.modeling_layers import GradientCheckpointingLayer


def cast_layer_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and biases of the linear maps in the encoder's layers as autocast would cast them.

    The result is empty without autocast. Autocast launches a kernel for each of them, and another one for each
    gradient: 288 in VL-BERT BASE. Here they share a few.

    Returns:
        name of the parameter in the model -> its copy, through which gradients flow.
    """
    device = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(device):
        return {}
    parameters = {}
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, nn.Linear):
                parameters |= {f"{name}.{key}": value for key, value in module.named_parameters(recurse=False)}
    copies = CastTogether.apply(torch.get_autocast_dtype(device), *parameters.values())
    return dict(zip(parameters, copies, strict=True))


class CastTogether(torch.autograd.Function):
    """Cast float32 tensors to another dtype, and their gradients back, with one operator for all of them."""

    @staticmethod
    def forward(ctx: FunctionCtx, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _cast(tensors, dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rows = [row for row, gradient in enumerate(gradients) if gradient is not None]
        results: list[Tensor | None] = [None] * len(gradients)
        for row, result in zip(rows, _cast([gradients[row] for row in rows], torch.float32), strict=True):
            results[row] = result
        return None, *results


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return tuple(copies)
