"""End-to-end vision-and-language training, from raw pixels.

import e2e_vl

model = e2e_vl.load("demo")  # the model that comes along, or a run
scene = model.examples[0]
answer = model.ask(scene.image, scene.texts[0])
answer.box, answer.score, answer.draw()
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_vl.registry import ENCODERS

if TYPE_CHECKING:
    from e2e_vl.api.detector import TrainedDetector
    from e2e_vl.api.model import TrainedModel

__version__ = "0.1.0"
__all__ = ["__version__", "load", "load_detector", "register_encoders"]


def load(source: str | Path, device: Any = None, dtype: Any = None) -> TrainedModel:
    """Load a trained model.

    Args:
        source: a run directory of e2e-vl train, a folder that `save_pretrained` wrote, a name on the Hugging Face
            hub, or "demo", the model of drawn scenes that comes along.
        device: "cpu", "cuda", "cuda:1", "mps", a number of a GPU, or a torch.device; None = the CUDA GPU if there is
            one, else the CPU.
        dtype: float32, bfloat16 or float16, by name or as a dtype of torch, to compute in where that is safe; weights
            and boxes stay float32. None = the run's mixed precision.
    """
    from e2e_vl.api.model import load as load_trained  # torch and transformers take seconds to import

    return load_trained(source, device, dtype)


def load_detector(
    source: str | Path,
    config: str | Path | None = None,
    device: Any = None,
    *,
    class_names: str | Path | None = None,
    attribute_names: str | Path | None = None,
    dtype: Any = None,
) -> TrainedDetector:
    """Load a detector.

    Args:
        source: published weights by name (docs/detectors.md), a run directory of e2e-vl train, a saved detector's
            folder, or a weights file (with `config`).
        config: Detectron2 YAML file of a weights file.
        device: as in `load`.
        class_names: text file with one class name per line, for weights without names (bottom-up attention's
            objects_vocab.txt).
        attribute_names: likewise for attributes (attributes_vocab.txt); regions then have attributes.
        dtype: as in `load`; None = float32.
    """
    from e2e_vl.api.detector import TrainedDetector  # torch takes seconds to import, and transformers more
    from e2e_vl.extraction.regions import find_detector
    from e2e_vl.run.devices import choose_device

    device = choose_device(device)  # before weights are downloaded
    loaded = find_detector(source, config, class_names=class_names, attribute_names=attribute_names)
    return TrainedDetector(loaded, device, dtype)


def register_encoders() -> None:
    """Register the encoders with `AutoConfig` and `AutoModel` of transformers."""
    for part in ENCODERS.values():
        _ = part.cls  # importing an encoder registers it
