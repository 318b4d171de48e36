"""`train.torch_compile`: a model's blocks and layers are compiled, each kind of them once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.modeling_layers import GradientCheckpointingLayer

from detector.errors import UserError
from e2e_vl.model import VisionLanguageModel

# Graphs of one `forward`. A ResNet needs up to 10 in training (the first block of a stage and the others, with and
# without gradients, res5 with and without pooling), as many in evaluation, and again for batches of a single image.
MAX_GRAPHS = 64


def compile_blocks(model: VisionLanguageModel) -> None:
    """Compile each block of the detector and each layer of the encoder, in place, for all sizes of images and texts.

    Blocks that are alike share their graphs. More than MAX_GRAPHS of them are an error in this process from now on;
    torch would run the other blocks without compiling them.
    """
    # importing it takes 2 seconds
    import torch._dynamo.config as dynamo_config

    dynamo_config.cache_size_limit = MAX_GRAPHS  # torch 2.6 knows only these names, newer versions know them too
    dynamo_config.fail_on_cache_limit_hit = True
    layers = [layer for layer in model.encoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for block in (*model.detector.blocks_to_compile(), *layers):
        block.compile(dynamic=True)


@contextlib.contextmanager
def explain_too_many_graphs() -> Iterator[None]:
    """Turn torch's error about too many graphs into a UserError."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":  # without importing torch._dynamo
            raise
        raise UserError(
            f"A block was compiled {MAX_GRAPHS} times, because its attributes or the sizes of its inputs keep "
            "changing; set train.torch_compile to false (TORCH_LOGS=recompiles names what changes)."
        ) from error
