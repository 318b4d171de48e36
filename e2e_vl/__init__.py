"""End-to-end vision-and-language training, from raw pixels.

import e2e_vl

model = e2e_vl.load("runs/demo_refcoco")
answer = model.ask("photo.jpg", "the small red circle")
answer.box, answer.score, answer.draw()
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_vl.auto_classes import register_encoders

if TYPE_CHECKING:
    from e2e_vl.api.trained_model import TrainedModel

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

register_encoders()


def load(source: str | Path, device: Any = None) -> TrainedModel:
    """Load a trained model to ask it.

    Args:
        source: a run directory of tools/train.py, a folder that `save_pretrained` wrote, or a name on the Hugging Face
            hub.
        device: where it runs; None = the GPU if there is one.

    Raises:
        FileNotFoundError, ValueError: no model there, or files that do not fit together.
    """
    from e2e_vl.api.trained_model import load as load_trained  # torch and transformers take seconds to import

    return load_trained(source, device)
