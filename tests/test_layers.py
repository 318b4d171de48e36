"""Imports go down the layers only, and files stay small."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("detector", "e2e_vl", "tools")
MAX_LINES = 450

# Layer -> layers that it may import besides itself, from the bottom up. Encoders, readers and metrics never meet: the
# model, the tasks and the engine bring them together. `synthetic` writes the official formats and must not read them
# with the readers, so that each checks the other.
BELOW_ENCODERS = {"base", "detector"}
BELOW_MODEL = BELOW_ENCODERS | {"encoders", "data", "evaluation", "synthetic", "tasks"}
MAY_IMPORT: dict[str, set[str]] = {
    "detector": set(),
    "base": {"detector"},
    "encoders": BELOW_ENCODERS,
    "data": BELOW_ENCODERS,
    "evaluation": set(),  # and EVALUATION_EXTRA
    "synthetic": BELOW_ENCODERS,
    "tasks": BELOW_ENCODERS | {"evaluation"},  # a task reads `EncoderOutput` (e2e_vl/structures.py), not an encoder
    "model": BELOW_MODEL,
    "weights": BELOW_MODEL | {"model"},
    "report": {"base", "tasks"},  # the task draws its predictions
    "extraction": BELOW_ENCODERS | {"data"},  # knows detectors and readers, but no encoder and no task
    "engine": BELOW_MODEL | {"model", "weights", "report"},
    "analysis": BELOW_MODEL | {"model", "weights", "engine"},
    "api": BELOW_MODEL | {"model", "weights", "extraction", "engine"},
    "explorer": BELOW_MODEL | {"api"},  # one model, one visitor, one photo
    "commands": BELOW_MODEL | {"model", "weights", "report", "extraction", "engine", "analysis", "api", "explorer"},
    "tools": BELOW_MODEL
    | {"model", "weights", "report", "extraction", "engine", "analysis", "api", "explorer", "commands"},
}
# Modules and packages directly in e2e_vl/ whose layer is not their own name.
BASE = (
    *(
        "__init__",
        "attention",
        "box_sources",
        "config",
        "data_settings",
        "converter",
        "detector_yaml",
        "drawing",
        "examples",
        "file_names",
        "phrases",
        "region_masking",
        "layout",
        "metric_names",
        "plain_yaml",
        "records",
        "json_keys",
        "run_files",
        "setting_kinds",
        "setting_references",
        "whole_files",
    ),
    *("command_line", "samples", "structures", "targets", "text", "preprocessor"),
)
LAYER_OF_NAME = dict.fromkeys(BASE, "base")
LAYER_OF_NAME["__init__"] = "api"  # `e2e_vl.load`
LAYER_OF_NAME |= {name: name for name in MAY_IMPORT if name not in ("detector", "base", "tools")}

EVALUATION_EXTRA = tuple(
    f"detector.{name}" for name in ("boxes", "errors", "file_faults", "user_paths", "whole_writer")
)
THIRD_PARTY = {
    "detector": {
        *("torch", "torchvision", "jaxtyping", "numpy", "cv2", "PIL", "yaml", "safetensors", "pycocotools", "tqdm"),
        "filelock",
    },
    "evaluation": {"numpy"},
}
ONLY_IN = {
    "detectron2": "detector/detectron2_backend.py",
    "gradio": "e2e_vl/explorer/web_page.py",
}  # optional packages, each behind one file
# Modules in the folders of tools/, by the plain names under which their neighbours import them.
NEIGHBOURS = {path.stem: path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tools").glob("*/*.py")}


def source_files() -> list[str]:
    """Paths of the Python files of all packages, relative to the repository, with forward slashes."""
    return sorted(path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def layer_of_file(file: str) -> str:
    """Raises ValueError for a file that no layer holds."""
    package, name = file.removesuffix(".py").split("/")[:2]
    if package in ("detector", "tools"):
        return package
    if name not in LAYER_OF_NAME:
        raise ValueError(f"{file} belongs to no layer; add '{name}' to the layers in tests/test_layers.py.")
    return LAYER_OF_NAME[name]


def layer_of_import(target: str) -> str | None:
    """Layer of a dotted name, or None for another project's. A name that is not a module belongs to `__init__`."""
    package, _, rest = target.partition(".")
    if package in ("detector", "tools"):
        return package
    return LAYER_OF_NAME.get(rest.split(".")[0], "base") if package == "e2e_vl" else None


def imports(file: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports, also inside functions; `from a import b` gives `a.b`."""
    package = file.split("/")[:-1]
    for node in ast.walk(ast.parse(source, filename=file)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package[: len(package) - level + 1] if level else []
                prefix = ".".join([*parents, *([module] if module else [])])
                yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def violations(file: str, source: str) -> list[str]:
    """One sentence for each import that the file's layer forbids."""
    layer, folder = layer_of_file(file), file.rpartition("/")[0]
    found = []
    for line, target in imports(file, source):
        other = layer_of_import(target)
        if other is None:
            top = target.split(".")[0]
            if NEIGHBOURS.get(top, folder) != folder:
                found.append(f"{file}:{line} imports {target}; only scripts in {NEIGHBOURS[top]} may.")
                continue
            if top in ONLY_IN:
                if file != ONLY_IN[top]:
                    found.append(f"{file}:{line} imports {target}; only {ONLY_IN[top]} may.")
                continue
            known = top in sys.stdlib_module_names or top in THIRD_PARTY.get(layer, {top})
            if not known:
                found.append(f"{file}:{line} imports {target}; {layer} may only use {sorted(THIRD_PARTY[layer])}.")
        elif other == "tools":
            found.append(f"{file}:{line} imports {target}; nothing imports tools.")
        elif other not in MAY_IMPORT[layer] | {layer}:
            is_extra = layer == "evaluation" and any(f"{target}.".startswith(f"{one}.") for one in EVALUATION_EXTRA)
            if not is_extra:
                found.append(f"{file}:{line} imports {target}; layer '{layer}' must not import layer '{other}'.")
    return found


def import_circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, or an empty list; `sources` maps files to their text."""
    module_of = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in sources}
    graph: dict[str, set[str]] = {module: set() for module in module_of.values()}
    for file, module in module_of.items():
        for _, target in imports(file, sources[file]):
            imported = target if target in graph else target.rpartition(".")[0]  # `from module import name`
            if imported in graph and imported != module:
                graph[module].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_file_belongs_to_a_layer() -> None:
    files = source_files()
    assert {"detector/structures.py", "e2e_vl/structures.py"} <= set(files)
    for file in files:
        layer_of_file(file)


def test_imports_go_down() -> None:
    found = [line for file in source_files() for line in violations(file, (ROOT / file).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in source_files()}
    assert not (circle := import_circle(sources)), "Modules import each other in a circle: " + " <- ".join(circle)


def test_layers_import_lower_layers_only() -> None:
    layers = list(MAY_IMPORT)
    for number, layer in enumerate(layers):
        assert MAY_IMPORT[layer] <= set(layers[:number]), f"'{layer}' may import a layer that stands above it."


def test_scripts_in_folders_of_tools_have_names_of_their_own() -> None:
    paths = sorted((ROOT / "tools").glob("*/*.py"))
    assert {"benchmarks", "experiments"} <= {path.parent.name for path in paths}
    assert len(NEIGHBOURS) == len(paths), "Tests import these modules by plain names: no two may have the same."
    assert not NEIGHBOURS.keys() & sys.stdlib_module_names


def test_files_stay_small() -> None:
    lengths = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in source_files()}
    long = {file: length for file, length in lengths.items() if length > MAX_LINES}
    assert not long, f"Split these files; none may have more than {MAX_LINES} lines: {long}"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("detector/boxes.py", "from e2e_vl.structures import Batch"),
        ("detector/boxes.py", "import transformers"),
        ("detector/boxes.py", "def late():\n    import e2e_vl"),
        ("e2e_vl/examples.py", "from e2e_vl.model import Model"),
        ("e2e_vl/text.py", "from e2e_vl import data"),
        ("e2e_vl/drawing.py", "from .engine.train import train"),
        ("e2e_vl/encoders/vl_bert.py", "from ..data.loading.collate import collate"),
        ("e2e_vl/encoders/vl_bert.py", "from .. import tasks"),
        ("e2e_vl/data/refcoco.py", "def late():\n    from e2e_vl.metrics import refexp"),
        ("e2e_vl/data/refcoco.py", "import e2e_vl.model as model"),
        ("e2e_vl/data/refcoco.py", "import importlib\nimportlib.import_module('e2e_vl.tasks.refcoco')"),
        ("e2e_vl/metrics/refcoco.py", "import torch"),
        ("e2e_vl/metrics/refcoco.py", "from e2e_vl.structures import Batch"),
        ("e2e_vl/metrics/refcoco.py", "from detector.boxes_extra import area"),
        ("e2e_vl/metrics/refcoco.py", "import detector"),
        ("e2e_vl/synthetic/writers.py", "from e2e_vl.data.refcoco import read_refs"),
        ("e2e_vl/tasks/refcoco.py", "from e2e_vl.model import Model"),
        ("e2e_vl/tasks/refcoco.py", "from e2e_vl.encoders.vl_bert import VLBertModel"),
        ("e2e_vl/model.py", "if True:\n    from e2e_vl.run import train"),
        ("e2e_vl/run/train.py", "from tools.train import main"),
        ("e2e_vl/run/train.py", "import measuring"),
        ("e2e_vl/run/train.py", "from e2e_vl.cli.train import main"),
        ("e2e_vl/config.py", "from e2e_vl import commands"),
        ("e2e_vl/cli/train.py", "from tools.train import main"),
        ("e2e_vl/run/build.py", "from e2e_vl.extraction.regions import RegionExtractor"),
        ("e2e_vl/run/report.py", "from e2e_vl.run.build import Run"),
        ("e2e_vl/extraction/bulk.py", "from e2e_vl.run.launch import make_accelerator"),
        ("e2e_vl/weights/start.py", "from e2e_vl.run.build import Run"),
        ("tools/experiments/table4.py", "from measuring import machine_facts"),
        ("tools/train.py", "import tools.evaluate"),
        ("detector/faster_rcnn.py", "from detectron2.modeling import build_model"),
        ("e2e_vl/run/build.py", "def late():\n    import detectron2"),
        ("e2e_vl/explorer/session.py", "import gradio"),
        ("e2e_vl/api/results.py", "from e2e_vl.explorer.session import draw_regions"),
    ],
)
def test_checker_flags_a_forbidden_import(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("detector/boxes.py", "import math\nimport cv2\nfrom . import structures\nfrom torchvision.ops import nms"),
        ("e2e_vl/text.py", "import transformers\nfrom e2e_vl.structures import TextBatch\nfrom e2e_vl import __doc__"),
        ("e2e_vl/data/refcoco.py", "from e2e_vl import config, text\nfrom detector.images import load_image"),
        (
            "e2e_vl/metrics/refcoco.py",
            "import numpy as np\nfrom detector import boxes\nfrom detector.boxes import area",
        ),
        ("e2e_vl/tasks/refcoco.py", "from ..evaluation import refexp\nfrom e2e_vl.structures import EncoderOutput"),
        ("e2e_vl/model.py", "from e2e_vl.encoders.vl_bert import VLBertModel\nfrom e2e_vl.tasks import refcoco"),
        ("e2e_vl/run/train.py", "from e2e_vl.model import Model\nfrom e2e_vl.synthetic import scenes"),
        ("tools/train.py", "from e2e_vl.cli.train import main"),
        ("e2e_vl/cli/train.py", "def main():\n    from e2e_vl.run.train import train"),
        ("tools/benchmarks/benchmark.py", "import measuring\nfrom grouped_steps import show\nimport psutil"),
        ("e2e_vl/run/train.py", "from e2e_vl.run.report import write_report"),
        ("detector/detectron2_backend.py", "from detectron2.modeling import build_model"),
    ],
)
def test_checker_allows_a_downward_import(file: str, source: str) -> None:
    assert violations(file, source) == []


@pytest.mark.parametrize("file", ["e2e_vl/helpers.py", "e2e_vl/misc/tricks.py"])
def test_checker_rejects_a_file_without_a_layer(file: str) -> None:
    with pytest.raises(ValueError, match=f"{file} belongs to no layer"):
        layer_of_file(file)


def test_checker_finds_a_circle() -> None:
    line = {"e2e_vl/a.py": "from e2e_vl.b import x", "e2e_vl/b.py": "from . import c", "e2e_vl/c.py": "import os"}
    assert import_circle(line) == []
    circle = import_circle(line | {"e2e_vl/c.py": "def late():\n    import e2e_vl.a"})
    assert set(circle) == {"e2e_vl.a", "e2e_vl.b", "e2e_vl.c"}
