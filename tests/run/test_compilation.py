"""`train.torch_compile`, without code generation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from detector.errors import UserError
from e2e_vl.run import compilation
from e2e_vl.run.train import train
from tests.run.compiled_steps import NO_DROPOUT
from tests.run.runs import ROOT, logged

GIVEN_BOXES = ("data.boxes.train=gt", "detector.loss_weight=0", "eval.boxes=[]", "train={max_steps: 2, trackers: []}")
# of the blocks in training: the first one and the others of res2, res3, res4 and res5; the second one of res3 has an
# input with a gradient, as the others; and the layers of the encoder. As many in evaluation
GRAPHS = 2 * (8 + 1)


@pytest.fixture
def compiled_classes(monkeypatch) -> set[str]:
    """Compile with a backend that runs the graphs as they are; the names of the classes."""
    classes = set()
    real = torch.nn.Module.compile

    def compile_for_test(self, **options):
        classes.add(type(self).__name__)
        real(self, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_for_test)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=8, fail_on_cache_limit_hit=False):  # restores them
        yield classes
    torch._dynamo.reset()


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 2e-2)])
def test_a_graph_for_each_kind_of_block_serves_all_shapes(precision: str, tolerance: float, tmp_path: Path):
    command = [sys.executable, "-m", "tests.run.compiled_steps", precision, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["graphs"] <= GRAPHS
    assert not result["breaks"]
    for compiled, eager in zip(result["compiled"], result["eager"], strict=True):
        assert compiled == pytest.approx(eager, rel=tolerance)


def test_compiled_blocks_train_like_others(tiny_config, tmp_path: Path, compiled_classes):
    words = (*GIVEN_BOXES, *NO_DROPOUT)
    config = tiny_config(*words)
    compiled = tiny_config(*words, "train.torch_compile=true", f"output={tmp_path / 'compiled'}")
    train(config)
    train(compiled)
    assert compiled_classes == {"BasicBlock", "BottleneckBlock", "VLBertLayer"}
    for line, compiled_line in zip(logged(config.output), logged(compiled.output), strict=True):
        assert compiled_line["referring"] == pytest.approx(line["referring"], rel=1e-5)


@pytest.mark.usefixtures("compiled_classes")
def test_too_many_graphs_are_an_error(tiny_config, monkeypatch):
    monkeypatch.setattr(compilation, "MAX_GRAPHS", 1)
    with pytest.raises(UserError, match=r"A block was compiled 1 times, .* set train.torch_compile to false"):
        train(tiny_config(*GIVEN_BOXES, "train.torch_compile=true"))
