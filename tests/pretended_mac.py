"""A pretended Mac: a machine without CUDA whose MPS device refuses float64, see `tests/pretended_gpu.py`.

    python -m tests.pretended_mac CONFIG KEY=VALUE ...

trains with these settings, asks the run on its default device and on MPS, and prints what it saw as JSON. The backward
pass cannot be pretended: in a build of torch for CUDA, autograd knows no other accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import e2e_vl
import e2e_vl.api.model  # torch's own imports must not meet what is pretended
from e2e_vl.config_files import load_config
from e2e_vl.run import train
from tests import pretended_gpu

MPS, META = 13, 14  # of c10::DeviceType


@contextlib.contextmanager
def pretended_mac() -> Iterator[None]:
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[MPS] = guards[META]  # a guard that does nothing
    pretended_gpu.names.append("mps:0")
    pretended_gpu.refused_dtypes.add(torch.float64)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(
            mock.patch.object(torch.accelerator, "current_accelerator", lambda *a, **k: torch.device("mps"))
        )
        stack.enter_context(mock.patch.object(torch.backends.mps, "is_available", lambda: True))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", pretended_gpu.attention))
        stack.enter_context(pretended_gpu.PretendedGPU())
        yield


def ask(run: str, photo: Path, device: str | None) -> dict[str, Any]:
    """What a run says about a photo on a device, with predicted and given boxes."""
    model = e2e_vl.load(run, device=device)
    given = np.array([[5.0, 5.0, 40.0, 40.0], [20.0, 10.0, 60.0, 50.0]])
    detector = e2e_vl.load_detector(run, device=device)
    return {
        "device": str(model.device),
        "predicted": model.ask(photo, "the small red circle").boxes.tolist(),
        "given": model.ask(photo, "the small red circle", boxes=given).score,
        "bfloat16": model.to(dtype="bf16").ask(photo, "the small red circle", boxes=given).score,
        "regions": model.to(dtype="fp32").regions(photo).boxes.tolist(),
        "features": detector.regions(photo, boxes=given).features.tolist(),
    }


def main(config: str, words: list[str]) -> dict[str, Any]:
    settings = load_config(Path(config), words)
    train.train(settings)
    photo = next(Path(settings.data.root).rglob("*.jpg"))
    return {"default": ask(settings.output, photo, None), "mps": ask(settings.output, photo, "mps")}


if __name__ == "__main__":
    with pretended_mac(), contextlib.redirect_stdout(sys.stderr):
        results = main(sys.argv[1], sys.argv[2:])
    print(json.dumps(results))
