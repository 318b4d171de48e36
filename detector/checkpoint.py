"""Saving and loading detectors: a folder of `config.yaml` (Detectron2 keys) and `model.safetensors`.

Weights are loaded strictly. Nothing is copied into the model before every key of the file has found its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from detector.anchors import make_cell_anchors
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN

CONFIG_NAME = "config.yaml"
WEIGHTS_NAME = "model.safetensors"
SHOWN_KEYS = 3  # of each kind in an error message

# Detectron2 saved these as buffers until May 2021. They repeat the config, so they are compared with it, not loaded.
CELL_ANCHORS = "proposal_generator.anchor_generator.cell_anchors.0"
TOLERANCE = 1e-3  # pixels or grey levels


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How the keys of a weights file and of a model fit together."""

    matched: list[str]
    missing: list[str]  # in the model, not in the file
    unexpected: list[str]  # in the file, not in the model
    mismatched: list[str]  # in both, with other shapes: "key [file shape] -> [model shape]"

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def summary(self) -> str:
        """One clause that counts each kind of misfit and names the first keys of it."""
        parts = [f"{len(self.matched)} keys match"]
        for kind in ("missing", "unexpected", "mismatched"):
            keys = getattr(self, kind)
            if keys:
                more = ", ..." if len(keys) > SHOWN_KEYS else ""
                parts.append(f"{len(keys)} {kind} ({', '.join(keys[:SHOWN_KEYS])}{more})")
        return ", ".join(parts)


def compare_keys(module: nn.Module, tensors: dict[str, Tensor]) -> LoadReport:
    """Match a state dict with a module, without loading it.

    `num_batches_tracked` of batch norms takes no part: it changes nothing, and a frozen batch norm does not have it.
    """
    own = module.state_dict()
    names = [name for name in own if not name.endswith("num_batches_tracked")]
    given = [name for name in tensors if not name.endswith("num_batches_tracked")]
    shared = [name for name in names if name in tensors]
    fits = {name: own[name].shape == tensors[name].shape for name in shared}
    return LoadReport(
        matched=[name for name in shared if fits[name]],
        missing=[name for name in names if name not in tensors],
        unexpected=[name for name in given if name not in own],
        mismatched=[
            f"{name} {list(tensors[name].shape)} -> {list(own[name].shape)}" for name in shared if not fits[name]
        ],
    )


def load_weights(
    detector: FasterRCNN,
    tensors: dict[str, Tensor],
    source: str | Path,
    *,
    may_miss: Sequence[str] = (),
    may_exceed: Sequence[str] = (),
) -> LoadReport:
    """Load a state dict with Detectron2's names; all of it must fit, or nothing is loaded.

    Args:
        source: the file's name, for the error message.
        may_miss, may_exceed: prefixes of keys that may be missing from the file, or be in it without a use.

    Returns:
        the report, in which the permitted misfits are listed too.

    Raises:
        ValueError: other misfits, or buffers of an old checkpoint that contradict the config.
    """
    tensors = _drop_config_buffers(detector, tensors, source)
    report = compare_keys(detector, tensors)
    judged = dataclasses.replace(
        report,
        missing=[name for name in report.missing if not name.startswith(tuple(may_miss))],
        unexpected=[name for name in report.unexpected if not name.startswith(tuple(may_exceed))],
    )
    if not judged.is_complete:
        raise ValueError(
            f"{source} does not fit the detector's config: {judged.summary()}; use the config it came with."
        )
    counters = [name for name in detector.state_dict() if name.endswith("num_batches_tracked") and name in tensors]
    detector.load_state_dict({name: tensors[name] for name in (*report.matched, *counters)}, strict=False)
    return report


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a `.safetensors` file or of a `.pth` state dict (bare, or under the key `model`). Runs no code.

    Raises:
        FileNotFoundError, ValueError: the file is missing, damaged, of another kind, or holds more than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as weights: {str(error).splitlines()[0]}") from error
    except Exception as error:  # torch raises pickle errors of several kinds for a file that is not plain tensors
        raise ValueError(
            f"{path}: not a plain file of tensors ({type(error).__name__}); it was not executed."
        ) from error
    state = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path}: expected a state dict of tensors, bare or under the key `model`.")
    return state


def save_pretrained(detector: FasterRCNN, directory: str | Path) -> None:
    """Write `config.yaml` and `model.safetensors` (Detectron2's parameter names) into a folder, made if needed."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).write_text(detector.config.to_yaml(), encoding="utf-8")
    tensors = {name: value.detach().cpu().contiguous() for name, value in detector.state_dict().items()}
    save_file(tensors, directory / WEIGHTS_NAME)


def load_detector(directory: str | Path) -> FasterRCNN:
    """A detector as `save_pretrained` wrote it, on CPU and in evaluation mode.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or the weights do not fit the config.
    """
    directory = Path(directory)
    detector = FasterRCNN(DetectorConfig.from_yaml(directory / CONFIG_NAME))
    load_weights(detector, read_tensors(directory / WEIGHTS_NAME), directory / WEIGHTS_NAME)
    return detector.eval()


def _drop_config_buffers(detector: FasterRCNN, tensors: dict[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    settings, anchors = detector.config.input, detector.config.anchors
    expected = {
        CELL_ANCHORS: (make_cell_anchors(anchors.sizes[0], anchors.aspect_ratios[0]), "MODEL.ANCHOR_GENERATOR"),
        "pixel_mean": (torch.tensor(settings.pixel_mean), "MODEL.PIXEL_MEAN"),
        "pixel_std": (torch.tensor(settings.pixel_std), "MODEL.PIXEL_STD"),
    }
    for name, (value, key) in expected.items():
        if name not in tensors:
            continue
        found = tensors[name].float().cpu().reshape(-1)
        if found.numel() != value.numel() or not torch.allclose(found, value.reshape(-1), rtol=0, atol=TOLERANCE):
            shown = [round(number, 2) for number in found[:8].tolist()]
            raise ValueError(f"{source}: its {name} {shown} contradicts {key} of the config; correct the config.")
    return {name: value for name, value in tensors.items() if name not in expected}
