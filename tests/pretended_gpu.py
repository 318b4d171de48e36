"""A pretended GPU: tensors that say `cuda:0`, also to autograd, hold CPU tensors; waits of the host are counted.

The CUDA branches of the code run without a GPU, and an operator that mixes both devices is an error, as on a GPU. It
relies on internals of torch, so it runs in a process of its own:

    python -m tests.pretended_gpu '[{"config": "configs/tiny/refcoco.yaml", "words": ["train.max_steps=1"]}]'

trains with each of these settings and prints, as JSON, the waits and launches of the last training step, the waits of
each evaluation, of questions about the photo that a job names, and of its regions. A job may replace the encoder, too.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

ROOT = Path(__file__).parents[1]
WAITS = {"aten::nonzero", "aten::masked_select", "aten::bincount", "torchvision::nms", "aten::_local_scalar_dense"}
COPIES = {"aten::copy_", "aten::_to_copy"}
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_")
TAKES_SCALARS = {"aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::fill_", *INDEXED}
EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
WITHOUT_KERNEL = {"aten::_unsafe_view", *EMPTY}
waits: collections.Counter = collections.Counter()
launches: collections.Counter = collections.Counter()  # operators that compute or copy
kept: list = []  # what C++ points at
names = ["cuda:0"]  # of the pretended device; tests/pretended_mac.py adds another one
refused_dtypes: set[torch.dtype] = set()


class DeviceTensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        if inner.dtype in refused_dtypes:
            raise TypeError(f"{names[-1]} has no {inner.dtype}.")
        made = torch.Tensor._make_wrapper_subclass(
            *(cls, inner.shape, inner.stride(), inner.storage_offset()), dtype=inner.dtype, device=names[-1]
        )
        made.on_cpu = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def tolist(self):
        wait("tolist")
        return self.on_cpu.tolist()

    def numpy(self, **_):
        raise TypeError(f"can't convert {names[-1]} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __reduce_ex__(self, protocol):
        return self.on_cpu.__reduce_ex__(protocol)

    def data_ptr(self):
        return self.on_cpu.data_ptr()

    def untyped_storage(self):
        return self.on_cpu.untyped_storage()


def wait(what: str) -> None:
    """Count a wait of the host at the line of this project that caused it."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith((f"{ROOT}/detector", f"{ROOT}/e2e_vl")):
        frame = frame.f_back
    waits[f"{frame.f_code.co_filename[len(str(ROOT)) + 1 :]}:{frame.f_lineno} {what}" if frame else what] += 1


def dispatch(func, args, kwargs):
    name = func._schema.name
    flat, spec = tree_flatten((args, kwargs))
    devices = [value for value in flat if isinstance(value, torch.device)]
    wrapped = any(isinstance(value, DeviceTensor) for value in flat)
    if not wrapped and all(device.type == "cpu" for device in devices):
        return func(*args, **kwargs)
    plain = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor)]
    if wrapped and name not in COPIES:
        takes_scalars = torch.Tag.pointwise in func.tags or name in TAKES_SCALARS or name.startswith("aten::_")
        indices = args[1] if name in INDEXED else ()
        if indices and not isinstance(args[0], DeviceTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        moved = {id(index) for index in indices}  # indices may be on the CPU
        if bad := [value for value in plain if id(value) not in moved and (value.dim() or not takes_scalars)]:
            raise RuntimeError(f"{name}: all tensors must be on one device; {list(bad[0].shape)} is on the CPU.")
        is_fill = "put" in name and args[2].numel() == 1 and not isinstance(args[2], DeviceTensor)
        if name in WAITS or (not is_fill and any(one is not None and one.dtype == torch.bool for one in indices)):
            wait(name)
        if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            wait(name)
    is_to_cpu = devices[0].type == "cpu" if devices else name == "aten::copy_" and not isinstance(args[0], DeviceTensor)
    if wrapped and name in COPIES and is_to_cpu:
        wait("copy to the CPU")
    if not func.is_view and name not in WITHOUT_KERNEL:
        launches[name] += 1
    inner = [torch.device("cpu") if isinstance(v, torch.device) else getattr(v, "on_cpu", v) for v in flat]
    a, k = tree_unflatten(inner, spec)
    result = func(*a, **k | {key: False for key in ("pin_memory", "non_blocking") if key in k})
    if name == "aten::copy_" or (devices and all(device.type == "cpu" for device in devices)):
        return args[0] if name == "aten::copy_" else result
    result = tree_map_only(torch.Tensor, DeviceTensor, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if wrapped else result


class PretendedGPU(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def prepare_engine() -> None:
    """`backward` asks C++ hooks for the driver's contexts; they get a table of functions in which that one says no."""
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._set_cudnn_enabled(False)  # cuDNN's batch norm has no CPU kernel
    torch.__future__.set_swap_module_params_on_conversion(True)
    get_hooks = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * 98).from_buffer_copy(ctypes.string_at(hooks[0] - 16, 8 * 98))
    says_no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda hooks, index: False)
    table[2 + 4] = ctypes.cast(says_no, ctypes.c_void_p).value  # hasPrimaryContext
    kept.extend([table, says_no])
    atexit.register(hooks.__setitem__, 0, hooks[0])
    hooks[0] = ctypes.addressof(table) + 16


def attend(q, k, v, mask, scale):
    return (q @ k.mT * (scale or q.shape[-1] ** -0.5) + mask).softmax(-1).to(v.dtype) @ v


def laid_out(values: torch.Tensor) -> DeviceTensor:
    """Lay out [M, heads, Z, width] in memory as [M, Z, heads, width], as the kernels do."""
    return DeviceTensor(values.transpose(1, 2).contiguous().transpose(1, 2))


class FusedAttention(torch.autograd.Function):
    """Attention as a GPU computes it: one operator, and another one for the gradients."""

    @staticmethod
    def forward(ctx, scale, *tensors):
        needed = ctx.needs_input_grad[1:]
        ctx.inputs = [tensor.on_cpu.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            ctx.result = attend(*ctx.inputs, scale)
        launches["attention"] += 1
        return laid_out(ctx.result.detach())

    @staticmethod
    def backward(ctx, gradient):
        trained = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        gradients = iter(torch.autograd.grad(ctx.result, trained, gradient.on_cpu))
        launches["attention backward"] += 1
        return None, *(laid_out(next(gradients)) if tensor.requires_grad else None for tensor in ctx.inputs)


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    if not isinstance(q, DeviceTensor):
        return attend(q, k, v, attn_mask, scale)
    return FusedAttention.apply(scale, q, k, v, attn_mask.to(q.dtype))  # autocast casts the mask too


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    prepare_engine()
    answers: dict[str, Any] = {"is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True}
    answers |= {"get_device_name": "pretended GPU", "get_device_capability": (9, 0), "is_bf16_supported": True}
    answers |= dict.fromkeys(
        ["_lazy_init", "set_device", "manual_seed", "manual_seed_all", "empty_cache", "synchronize"]
    )
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *a, answer=answer, **k: answer))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", attention))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(PretendedGPU())
        yield


def measure(
    config: str,
    words: list[str],
    encoder: dict[str, Any] | None = None,
    photo: str | None = None,
    without_float64: bool = False,
) -> dict[str, Any]:
    """Train with these settings; the lines that waited in each part, and how often; the launches of the last step.

    With `without_float64`, the device refuses float64, as MPS does.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import e2e_vl
    from detector import boxes as box_functions
    from detector import roi_heads
    from e2e_vl.config_files import load_config
    from e2e_vl.run import checkpoint, evaluate, train
    from tests.weights.starts import replaced

    real_step, real_evaluate = train.Trainer.train_step, evaluate.Evaluator.predict_texts
    real_clip = Accelerator.clip_grad_norm_
    found: dict[str, Any] = {"evaluations": {}}

    def step(self, micro_batches):
        waits.clear(), launches.clear()
        result = real_step(self, micro_batches)
        found["step"] = dict(waits)
        return result

    def clip(self, *args):
        found["launches"] = launches.total()  # of the forward and backward pass
        return real_clip(self, *args)

    def evaluation(self, model, examples, **options):
        waits.clear()
        predictions = real_evaluate(self, model, examples, **options)
        batches = math.ceil(len(examples.groups) / self.config.eval.images_per_batch)
        found["evaluations"][options["name"]] = {line: count / batches for line, count in waits.items()}
        return predictions

    AcceleratorState._reset_state(True)
    refused_dtypes.clear()
    if without_float64:
        refused_dtypes.add(torch.float64)
    with (
        mock.patch.object(box_functions, "WITHOUT_FLOAT64", ("cuda",) if without_float64 else ("mps",)),
        mock.patch.object(checkpoint, "save_state", lambda *a, **k: None),  # it copies all parameters
        mock.patch.object(train.Trainer, "train_step", step),
        mock.patch.object(evaluate.Evaluator, "predict_texts", evaluation),
        mock.patch.object(Accelerator, "clip_grad_norm_", clip),
        mock.patch.object(roi_heads, "CHUNK", 6),  # as many chunks of RoIs as at the real size
    ):
        settings = load_config(Path(config), words)
        train.train(settings if encoder is None else replaced(settings, encoder=encoder))
    if photo is not None:
        model = e2e_vl.load(settings.output)
        for name, boxes in {"ask": None, "ask about boxes": np.array([[5.0, 5.0, 40.0, 40.0]])}.items():
            waits.clear()
            model.ask(next(Path(settings.data.root).glob(photo)), "the small red circle", boxes=boxes)
            found[name] = dict(waits)
        waits.clear()
        model.regions(next(Path(settings.data.root).glob(photo)))
        found["regions"] = dict(waits)
    return found


if __name__ == "__main__":
    with pretended_gpu(), contextlib.redirect_stdout(sys.stderr):
        results = [measure(**job) for job in json.loads(sys.argv[1])]
    print(json.dumps(results))
