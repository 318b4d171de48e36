"""The Python snippets of README and docs/, the notebook, and the commands of docs/your_own_data.md run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import train as train_tool

ROOT = Path(__file__).parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^accelerate launch tools/train.py (--config configs/own_data/.*)$", re.MULTILINE)

pytestmark = [
    pytest.mark.usefixtures("on_cpu", "unchecked_shapes"),
    pytest.mark.filterwarnings("ignore:The vocabulary of"),  # of the tiny run
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_run: SimpleNamespace) -> Path:
    """A working directory with what the snippets expect: the configs, a trained run and a photo."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo_refcoco").symlink_to(trained_run.path)
    records = json.loads((trained_run.path / "predictions_val_gt.json").read_text("utf-8"))
    (tmp_path / "photo.jpg").write_bytes(Path(records[0]["file_name"]).read_bytes())
    return tmp_path


def run_python(blocks: list[str]) -> dict:
    """One after the other, in one namespace, as a reader would."""
    names: dict = {}
    for block in blocks:
        exec(compile(block, "snippet", "exec"), names)
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/python_api.md"])
def test_snippets_of_a_page(page: str, folder: Path) -> None:
    blocks = PYTHON.findall((ROOT / page).read_text("utf-8"))
    assert blocks
    names = run_python(blocks)
    assert names["answer"].box is not None


def test_the_notebook(folder: Path) -> None:
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4 and not any(cell.get("outputs") for cell in cells), "the notebook is kept without outputs"
    names = run_python(code)
    assert len(names["found"]) >= 3 and (folder / "runs" / "quickstart_model" / "README.md").is_file()


def test_the_page_about_own_data(folder: Path) -> None:
    text = (ROOT / "docs" / "your_own_data.md").read_text("utf-8")
    draw, ask = PYTHON.findall(text)
    run_python([draw])
    commands = COMMAND.findall(text)
    assert len(commands) == 2
    for command in commands:
        assert train_tool.main([*shlex.split(command), "train.max_steps=2"]) == 0
    assert run_python([ask])["answer"].box is not None
    metrics = json.loads((folder / "runs" / "own_data_vqa" / "metrics.json").read_text("utf-8"))
    assert "train/accuracy_gt_boxes" in metrics and "val/accuracy_gt_boxes" in metrics
