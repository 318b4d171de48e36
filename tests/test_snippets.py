"""Run the Python code and the commands of README, pages of docs/ and the notebook, in order.

Commands run with less data and fewer steps; placeholders such as DETECTOR are replaced by files made here.
"""

from __future__ import annotations

import json
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torchvision.models import detection
from transformers import BertConfig, BertModel

from e2e_vl.cli import analyze_attention, ask, convert_annotations, explore, probe, run, score
from e2e_vl.text import build_vocabulary
from tests.extraction.tiny_detectors import save_tiny_detector
from tests.scoring.drawn import draw_flickr30k, draw_grefcoco, draw_refcoco

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FEW_STEPS = ["train.max_steps=2", "train.warmup_steps=1", "train.images_per_batch=4"]
# a tiny network beside the tiny detector of the fixture `placeholders`
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

pytestmark = [
    pytest.mark.usefixtures("on_cpu", "unchecked_shapes"),
    pytest.mark.filterwarnings("ignore:The vocabulary of"),  # of the tiny run
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_run: SimpleNamespace) -> Path:
    """A working directory with configs, tools and a photo."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")  # no link: relative paths are looked for beside a config
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    records = json.loads((trained_run.path / "predictions_val_gt.json").read_text("utf-8"))
    (tmp_path / "photo.jpg").write_bytes(Path(records[0]["file_name"]).read_bytes())
    return tmp_path


@pytest.fixture
def run_in_folder(folder: Path, trained_run: SimpleNamespace) -> Path:
    """The working directory, with a trained run where the pages expect the demo's."""
    (folder / "runs").mkdir()
    (folder / "runs" / "demo_refcoco").symlink_to(trained_run.path)
    return folder


@pytest.fixture
def placeholders(tmp_path: Path, trained_run: SimpleNamespace) -> dict[str, str]:
    """The values of the words in capitals."""
    bert = tmp_path / "bert"
    build_vocabulary(["the red blue green box one ?"], bert / "vocab.txt")
    words = len((bert / "vocab.txt").read_text("utf-8").splitlines())
    BertModel(BertConfig(vocab_size=words, **SMALL)).save_pretrained(bert)
    return {
        "DETECTOR": str(trained_run.path / "model" / "detector"),
        "BERT": str(bert),
        "IMAGE": "photo.jpg",
        "DIR": "asked",
    }


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(python or bash, content) of every block of a page, in its order."""
    return BLOCK.findall((ROOT / page).read_text("utf-8"))


def commands_of(block: str) -> list[str]:
    """The commands of a bash block, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def run_command(command: str, placeholders: dict[str, str]) -> None:
    """Run a command of a page, without the installation before it; it must be known and not fail."""
    words = shlex.split(command.split("&&")[-1])
    words = [re.sub(r"\b[A-Z]{3,}\b", lambda name: placeholders.get(name[0], name[0]), word) for word in words]
    for entry in ("e2e-vl", "e2e_vl"):  # the console script, or `accelerate launch -m e2e_vl`
        if entry in words:
            words = ["e2e-vl " + words[words.index(entry) + 1], *words[words.index(entry) + 2 :]]
    program = next((word for word in words if word.startswith("tools/")), words[0])
    options = words[words.index(program) + 1 :]
    runners: dict[str, Callable[[], int]] = {
        "pip": lambda: 0,  # what is installed here
        ".venv/bin/pytest": lambda: 0,  # this very run
        "tools/train.py": lambda: run.train([*options, *reduced(options, placeholders)]),
        "e2e-vl train": lambda: run.train([*options, *reduced(options, placeholders)]),
        "e2e-vl ask": lambda: ask.main(options, "e2e-vl ask"),
        "e2e-vl score": lambda: score.main(options),
        "e2e-vl convert-annotations": lambda: convert_annotations.main(options),
        # a server, and a run that no page makes: their own tests run them, here only the options are read
        "e2e-vl explore": lambda: int(not explore.build_parser().parse_args(options)),
        "e2e-vl analyze-attention": lambda: int(not analyze_attention.build_parser().parse_args(options)),
        "e2e-vl probe": lambda: int(not probe.build_parser().parse_args(options)),
        "tools/experiments/pairs.py": lambda: run_tool([program, *options, "--dry-run"]),
        "tools/benchmark.py": lambda: run_tool([program, *options, "--repetitions", "1"]),
    }
    assert program in runners, f"no test knows how to run: {command}"
    assert runners[program]() == 0, command


def reduced(options: list[str], placeholders: dict[str, str]) -> list[str]:
    """Settings that reduce a training run of a page to seconds."""
    config = options[options.index("--config") + 1]
    if "configs/demo" in config:
        return [*FEW_STEPS, "data.synthetic.scenes={train: 6, val: 3, test: 3}"]
    if "vl_bert_base" in config:
        tiny = yaml.safe_dump({**SMALL, "geometry_dim": 32}, default_flow_style=True).strip()
        detector = f"detector.config={placeholders['DETECTOR']}/config.yaml"
        return [*FEW_STEPS, "train.gradient_accumulation_steps=1", "data.workers=0", detector, f"encoder.config={tiny}"]
    weights = [f"detector.weights={placeholders['COCO']}"] if "coco_weights" in config else []
    return ["train.max_steps=2", *weights]


def run_tool(words: list[str]) -> int:
    """Run a tool in another process, because it starts processes or measures itself."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.returncode


def run_page(page: str, placeholders: dict[str, str]) -> tuple[dict, int]:
    """Run everything on a page; return the variables of its Python code and the number of commands."""
    names: dict = {}
    commands = 0
    for kind, block in blocks_of(page):
        if kind == "python":
            exec(compile(block, page, "exec"), names)
            continue
        for command in commands_of(block):
            run_command(command, placeholders)
            commands += 1
    return names, commands


def test_readme(folder: Path, placeholders: dict[str, str]) -> None:
    names, commands = run_page("README.md", placeholders)
    assert names["answer"].box is not None and names["nothing"].box is None and commands == 4
    assert (folder / "answer.png").is_file()
    assert (folder / "runs" / "demo_refcoco" / "report.html").is_file()


def test_the_page_about_own_data(folder: Path, placeholders: dict[str, str]) -> None:
    coco = detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)  # 91 classes
    torch.save(coco.state_dict(), folder / "coco.pth")
    page = "docs/your_own_data.md"
    names, commands = run_page(page, placeholders | {"COCO": str(folder / "coco.pth")})
    assert names["answer"].box is not None and commands == 5
    kept = load_file(folder / "runs" / "own_data_coco_weights" / "model" / "detector" / "model.safetensors")
    first = "backbone.body.0.0.weight"  # frozen
    assert torch.equal(kept[first], coco.state_dict()[first])
    assert len(kept["roi_heads.box_predictor.cls_score.weight"]) == 2  # one category and the background
    metrics = json.loads((folder / "runs" / "own_data_vqa" / "metrics.json").read_text("utf-8"))
    assert "train/accuracy_gt_boxes" in metrics and "val/accuracy_gt_boxes" in metrics


@pytest.mark.usefixtures("run_in_folder")
def test_the_pages_about_python_and_the_explorer(placeholders: dict[str, str]) -> None:
    save_tiny_detector("grounding_dino", Path("IDEA-Research/grounding-dino-tiny"))  # instead of the one of the hub
    names, commands = run_page("docs/python_api.md", placeholders)
    assert names["answer"].box is not None and commands == 1
    names = {}
    for kind, block in blocks_of("docs/explorer.md"):
        if kind == "python":  # its command opens a page and waits
            exec(compile(block, "docs/explorer.md", "exec"), names)
    assert names["picture"].ndim == 3 and names["masked"].masked == (0, 3)


def test_the_page_about_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    rows = draw_refcoco(tmp_path / "DATA", seed=0, folder="refcoco+")
    annotations: dict[str, list] = {"images": [], "annotations": []}
    results = []
    answers = []
    questions = []
    for number, row in enumerate(rows):
        annotations["images"].append({"id": number, "file_name": row["file_name"], "caption": row["words"]})
        annotations["annotations"].append({"image_id": number, "original_id": row["ann_id"]})
        instances = {"bboxes": torch.tensor([row["box"]]), "scores": torch.tensor([0.5])}
        results.append({"img_id": number, "pred_instances": instances})
        height, width = row["size"]
        x1, y1, x2, y2 = row["box"]
        corners = [x1 / width, y1 / height, x2 / width, y2 / height]
        answers.append({"answer": str([round(1000 * corner) for corner in corners])})
        questions.append({"image": row["file_name"], "sent": row["words"], "bbox": row["box"]})
    (tmp_path / "results.pkl").write_bytes(pickle.dumps(results))
    instance_lists = []
    for result in results:
        lists = {key: value.tolist() for key, value in result["pred_instances"].items()}
        instance_lists.append({"img_id": result["img_id"], "pred_instances": lists})
    phrases = {"image_id": 77, "sentence_id": 0, "boxes": draw_flickr30k(tmp_path / "DATA")}
    several = {row["sent_id"]: {"boxes": row["boxes"]} for row in draw_grefcoco(tmp_path / "DATA", seed=0)}
    contents = {
        "predictions.json": [{"sent_id": row["sent_id"], "box": row["box"]} for row in rows],
        "results.json": instance_lists,
        "finetune_refcoco+_val.json": annotations,
        "boxes_by_id.json": several,
        "phrases.json": [phrases],
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    for name, lines in {"answers.jsonl": answers, "questions.jsonl": questions}.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    names, commands = run_page("docs/scoring.md", {})
    assert commands == 5 and names["rows"] == instance_lists
    printed = capsys.readouterr().out
    assert printed.count("accuracy at 0.5               100.00") == 3
    assert re.search(r"Pr@\(F1=1\) +100.00", printed) and "R@1, any box" in printed


def test_the_notebook() -> None:
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4 and not any(cell.get("outputs") for cell in cells), "the notebook is kept without outputs"
    names: dict = {}
    for cell in code:
        for given, reduced in (("max_steps=100", "max_steps=2"), ("train: 200, val: 20", "train: 8, val: 2")):
            cell = cell.replace(given, reduced)
        exec(compile(cell, "quickstart.ipynb", "exec"), names)
    assert names["chosen"].box.tolist() == names["boxes"][2]
    assert len(names["regions"]) >= 3 and names["after"]["steps"] == 2
    assert (names["folder"] / "saved" / "README.md").is_file()
    assert not names["answer"].unknown_words, "it knows the new word"


def test_the_notebook_opens_in_colab_from_the_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    address = project.get("urls", {}).get("Repository", "https://github.com/OWNER/REPOSITORY")  # see .ci/release
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text("utf-8"))["cells"]
    link = f"https://colab.research.google.com/github/{address.removeprefix('https://github.com/')}/blob/main/docs/"
    assert f"({link}quickstart.ipynb)" in "".join(cells[0]["source"])
    assert f'"git+{address}"' in "".join(cells[1]["source"])
