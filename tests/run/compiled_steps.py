"""Steps of the BASE model, narrow but as deep as it is, with and without `train.torch_compile`.

It runs in a process of its own, because tests check annotated shapes at run time, and these checks cannot be compiled:

    python -m tests.run.compiled_steps bf16 FOLDER

prints, as JSON, losses and gradient norms of training steps with batches of several shapes, and what was compiled. The
backend traces the forward and backward pass and runs them as they are: generated code takes minutes and rounds in
another way.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any
from unittest import mock

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch._dynamo.utils import counters

from e2e_vl.config_files import load_config
from e2e_vl.run.build import build_run, resolve_config
from e2e_vl.run.launch import make_accelerator
from e2e_vl.run.train import Trainer
from tests.run.runs import NARROW_BASE, ROOT

NO_DROPOUT = tuple(f"encoder.config.{part}_dropout_prob=0" for part in ("hidden", "attention_probs", "region"))
SHAPES = ((32, 48), (48, 40), (64, 64), (48, 80))


def take_steps(precision: str, folder: str, *, is_compiled: bool) -> list[list[float]]:
    """Return loss and gradient norm of a step for each shape; a graph that is new after two steps is an error."""
    words = [*NARROW_BASE, *NO_DROPOUT, f"train.mixed_precision='{precision}'", f"train.torch_compile={is_compiled}"]
    words += [f"data.root={folder}/data", f"output={folder}/run"]
    config = resolve_config(load_config(ROOT / "configs" / "benchmark" / "train_base.yaml", words))
    torch.manual_seed(0)
    run = build_run(config)
    accelerator = make_accelerator(precision, kwargs_handlers=[DistributedDataParallelKwargs()])
    trainer = Trainer(config, accelerator, run, checkpoint=None)
    examples = [run.train_data[request] for request in next(iter(trainer.sampler))]
    batches = [run.collate(examples, pad_to=shape) for shape in SHAPES]
    steps = []
    for number, batch in enumerate(batches):
        with torch._dynamo.config.patch(error_on_recompile=number >= 2):
            values, _ = trainer.train_step([batch])
        steps.append([values["loss"], values["grad_norm"]])
    trainer.model.eval()
    with torch.no_grad():
        for batch in batches:
            trainer.model(batch)
    return steps


def main(precision: str, folder: str) -> dict[str, Any]:
    real = torch.nn.Module.compile

    def compile_without_code(self: torch.nn.Module, **options: Any) -> None:
        real(self, backend="aot_eager", **options)

    with mock.patch.object(torch.nn.Module, "compile", compile_without_code):
        compiled = take_steps(precision, folder, is_compiled=True)
    result = {
        "compiled": compiled,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }
    return {**result, "eager": take_steps(precision, folder, is_compiled=False)}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(*sys.argv[1:])
    print(json.dumps(result))
