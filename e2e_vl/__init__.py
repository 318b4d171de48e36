"""End-to-end vision-and-language training, from raw pixels.

import e2e_vl

model = e2e_vl.load("demo")  # the model that ships with the package, or a run
scene = model.examples[0]
answer = model.ask(scene.image, scene.texts[0])
answer.box, answer.score, answer.draw()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_vl.registry import ENCODERS

if TYPE_CHECKING:
    from e2e_vl.api.detector import TrainedDetector
    from e2e_vl.api.model import TrainedModel
    from e2e_vl.api.onnx_model import OnnxModel
    from e2e_vl.extraction.proposers import Proposer
    from e2e_vl.samples import ImageBytes

__version__ = "0.1.0"
__all__ = ["__version__", "load", "load_detector", "load_onnx", "load_proposer", "register_encoders", "video_frames"]


def load(
    source: str | Path,
    device: Any = None,
    dtype: Any = None,
    *,
    config: str | Path | None = None,
    answers: str | Path | list[str] | None = None,
    detector: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> TrainedModel:
    """Load a trained model.

    Args:
        source: a run directory of e2e-vl train, a folder that `save_pretrained` wrote, a name on the Hugging Face
            hub, "demo" (the model that ships with the package), or a published checkpoint of LXMERT, VisualBERT
            or VL-BERT: a file of the official code, or a folder of transformers.
        device: "cpu", "cuda", "cuda:1", "mps", a number of a GPU, or a torch.device; None = the CUDA GPU if there is
            one, else the CPU.
        dtype: float32, bfloat16 or float16, by name or as a dtype of torch, to compute in where that is safe; weights
            and boxes stay float32. None = the run's mixed precision.
        config: of a published checkpoint: the config of its model; None = the one for its task.
        answers: of a published checkpoint: the answers of its head in the order of the classes, a list or a file.
        detector: of a published checkpoint: weights of the detector, by name or file; None = those of the config.
        tokenizer: of a published checkpoint: a vocab.txt, a folder or a name; None = that of the config.
    """
    from e2e_vl.api.model import load as load_trained  # torch and transformers take seconds to import

    published = {"config": config, "answers": answers, "detector": detector, "tokenizer": tokenizer}
    return load_trained(source, device, dtype, **published)


def load_onnx(folder: str | Path, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> OnnxModel:
    """Load the ONNX files of a model, to ask it in onnxruntime and without torch.

    Args:
        folder: written by e2e-vl export --format onnx.
        providers: of onnxruntime, in the order in which they are tried.
    """
    from e2e_vl.api.onnx_model import OnnxModel  # late, as above

    return OnnxModel(folder, providers)


def video_frames(video: str | Path, frames_per_second: float = 1.0) -> Iterator[ImageBytes]:
    """Yield frames of a video file at a rate, for `model(video_frames("clip.mp4"), "the red car")`."""
    from e2e_vl.data.videos import read_frames  # late, as above

    return read_frames(video, frames_per_second)


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


def load_proposer(source: str | Path, device: Any = None) -> Proposer:
    """Load an object detector of transformers, for `model(image, text, boxes=proposer(image))`.

    Args:
        source: a name on the Hugging Face hub, or a folder, of a model for object detection (DETR, RT-DETR, D-FINE,
            RF-DETR, ...) or for zero-shot object detection, which looks for texts (Grounding DINO, OWLv2, ...).
        device: as in `load`.
    """
    from e2e_vl.extraction import proposers  # late, as above
    from e2e_vl.run.devices import choose_device

    device = choose_device(device)  # before weights are downloaded
    proposer = proposers.load_proposer(source)
    proposer.network.to(device)
    return proposer


def register_encoders() -> None:
    """Register the encoders with `AutoConfig` and `AutoModel` of transformers."""
    for part in ENCODERS.values():
        _ = part.cls  # importing an encoder registers it
