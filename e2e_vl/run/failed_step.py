"""A step whose numbers are NaN or infinite: what is said about it, and what is kept of it.

failed_step/
  about.json            step, sums of the losses, images
  batches_<process>.pt  its batches, as plain dicts (for `torch.load(..., weights_only=True)`), and the CPU's random
                        state before it
  weights.safetensors   of the whole model: as before the step, but batch norms may have seen its batch
  optimizer.pt          state of the optimiser before the step

The update was not made. The folder is for looking at; no run continues from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from detector.errors import UserError, first_line
from detector.io import atomic_file, write_json
from e2e_vl.io import without_nan
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.optim import NORM
from e2e_vl.structures import Batch

FOLDER = "failed_step"
SHOWN = 4  # images in the message


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinities; the device is waited for once."""
    floats = {name: value for name, value in tensors.items() if value.is_floating_point() and value.numel()}
    if not floats:
        return []
    flags = torch.stack([value.detach().isfinite().all() for value in floats.values()])
    return [name for name, flag in zip(floats, flags.tolist(), strict=True) if not flag]


@dataclasses.dataclass(frozen=True)
class FailedStep:
    """What this process knows of the step.

    Attributes:
        folder: where it is kept.
        step: its number, from 1.
        bad: losses, or what else became NaN.
        batches: its micro-batches.
        losses: of each micro-batch, as far as they were computed.
        random_state: of the CPU, before the step.
    """

    folder: Path
    step: int
    bad: list[str]
    batches: Sequence[Batch]
    losses: Sequence[Mapping[str, Tensor]]
    random_state: Tensor


def refuse(
    failed: FailedStep,
    accelerator: Accelerator,
    model: VisionLanguageModel,
    optimizer: torch.optim.Optimizer,
    *,
    advice: str,
    alone: bool,
) -> NoReturn:
    """Keep and tell what is known of a step; one process speaks, and the others leave silently.

    Args:
        advice: the end of the message.
        alone: the other processes know nothing of the failure.

    Raises:
        ValueError: always, with the losses and images that may have caused it.
    """
    suspects = [batch for batch, own in zip(failed.batches, failed.losses, strict=False) if not_finite(own)]
    images = [name for batch in suspects or failed.batches for name in batch.images.names]
    if not alone:  # batches with bad losses of their own, or if there are none, all
        of_all = gather_object([(bool(suspects), images)])
        images = [name for has_bad, names in of_all for name in names if has_bad == any(bad for bad, _ in of_all)]
    speaks = alone or accelerator.is_main_process
    problem = _keep(failed, accelerator.process_index, images, model if speaks else None, optimizer)
    bad = [name for name in failed.bad if name != NORM]  # after a loss, gradients are no news
    if not bad:
        names = _losses_without_gradient(model, failed.batches, accelerator)
        names = sorted({name for one in gather_object([names]) for name in one})
        bad = [f"the gradient of {name}" for name in names] or ["the gradient"]
    if not speaks:
        raise SystemExit(2)
    more = ", ..." if len(images) > SHOWN else ""
    kept = f"are in {failed.folder}" if problem is None else f"could not be written to {failed.folder} ({problem})"
    raise UserError(
        f"{', '.join(bad)} became NaN or infinite in step {failed.step} (images {', '.join(images[:SHOWN])}{more}); "
        "lower train.lr, set train.clip_norm, or look at these images' annotations. The update was not made; its "
        f"batch and the weights {kept}. {advice}"
    )


def _losses_without_gradient(
    model: VisionLanguageModel, batches: Sequence[Batch], accelerator: Accelerator
) -> list[str]:
    """Names of the losses that give gradients which are not finite, each computed once more by itself."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: list[str] = []
    try:
        for batch in batches:
            with accelerator.autocast():
                output = model(batch.to(accelerator.device))
            for name, loss in {**output.task_losses, **output.regions.losses}.items():
                if name not in found and loss.total.requires_grad:
                    gradients = torch.autograd.grad(loss.total, parameters, retain_graph=True, allow_unused=True)
                    if not_finite({str(n): one for n, one in enumerate(gradients) if one is not None}):
                        found.append(name)
    except (RuntimeError, FloatingPointError):  # nothing more can be said, and there is a message already
        pass
    return found


def _keep(
    failed: FailedStep,
    process: int,
    images: Sequence[str],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> str | None:
    """Write what is kept of the step; what there is no room for is left out.

    Args:
        process: number of this process, which writes its batches.
        model: on the process that writes the rest; None on the others.

    Returns:
        Why not all of it could be written, or None. It is no error, because the step already is one.
    """
    folder = failed.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / f"batches_{process}.pt") as part:
            content = {"batches": [_plain(batch) for batch in failed.batches], "random_state": failed.random_state}
            torch.save(content, part)
        if model is None:
            return None
        losses = [without_nan({name: float(value) for name, value in own.items()}) for own in failed.losses]
        about = {"step": failed.step, "not_finite": failed.bad, "images": list(images), "losses": losses}
        write_json(folder / "about.json", about)
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
        with atomic_file(folder / "weights.safetensors") as part:
            save_file(tensors, part)
        with atomic_file(folder / "optimizer.pt") as part:
            torch.save(optimizer.state_dict(), part)
    except (OSError, RuntimeError, SafetensorError) as error:
        return first_line(error)
    return None


def _plain(value: Any) -> Any:
    """Dicts, lists, tensors, numbers and texts, which load without running code."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value)
