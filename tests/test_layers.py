"""Layers and import cycles, and names of parts outside of their files."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from e2e_vl.registry import DATASETS, ENCODERS, TASKS

ROOT = Path(__file__).parents[1]
MAX_LINES = 900  # of a file

# Layer -> layers that it may import besides itself, from the bottom up. Encoders, data sets and metrics never meet: the
# model, the tasks and the run bring them together. `synthetic` writes the official formats and must not read them with
# the readers, so that each checks the other.
CORE = {"core", "detector"}
MODEL = CORE | {"encoders", "data", "metrics", "synthetic", "tasks"}
RUN = MODEL | {"model", "weights", "extraction"}
MAY_IMPORT: dict[str, set[str]] = {
    "detector": set(),
    "core": {"detector"},  # the modules directly in e2e_vl/
    "encoders": CORE,
    "data": CORE,
    "metrics": CORE,
    "synthetic": CORE,
    "scoring": CORE | {"data", "metrics"},  # somebody's predictions against the annotations, without a model
    "tasks": CORE | {"metrics"},  # a task reads `EncoderOutput` (e2e_vl/structures.py), not an encoder
    "model": MODEL,
    "weights": MODEL | {"model"},
    "extraction": CORE | {"data"},  # knows detectors and data, but no encoder and no task
    "run": RUN,
    "analysis": RUN | {"run"},
    "api": RUN | {"run"},
    "explorer": RUN | {"api"},
    "cli": RUN | {"scoring", "run", "analysis", "api", "explorer"},
    "tools": RUN | {"scoring", "run", "analysis", "api", "explorer", "cli"},
}
LAYERS = {"model": "model", "__init__": "api", "__main__": "cli"}  # of single modules in e2e_vl/
ONLY_IN = {  # optional packages, each imported by one file
    "detectron2": "detector/detectron2_backend.py",
    "gradio": "e2e_vl/explorer/web_page.py",
}
VISION_OF_TRANSFORMERS = "detector/backbones/auto_backbone.py"  # imported by its name in BACKBONES only


def sources() -> dict[str, str]:
    """File, relative to the repository, with forward slashes -> its text."""
    paths = [path for name in ("detector", "e2e_vl", "tools") for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(paths) > 50
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def layer_of(module: str) -> str | None:
    """The layer of a dotted name; None for third-party modules."""
    package, _, rest = module.partition(".")
    if package in ("detector", "tools"):
        return package
    if f"{rest}.".count(".config."):  # settings import no torch and no code of their part
        return "core"
    name = rest.partition(".")[0] or "__init__"
    return LAYERS.get(name, name if name in MAY_IMPORT else "core") if package == "e2e_vl" else None


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports, also inside functions; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(file: str, source: str) -> list[str]:
    """A message for each import that the layer of the file forbids."""
    layer = layer_of(file.removesuffix(".py").replace("/", "."))
    found = []
    for line, target in imports(source):
        other = layer_of(target)
        top = target.partition(".")[0]
        if file != ONLY_IN.get(top, file):
            found.append(f"{file}:{line} imports {target}; only {ONLY_IN[top]} may.")
        elif layer == "detector" and top == "transformers" and file != VISION_OF_TRANSFORMERS:
            found.append(f"{file}:{line} imports {target}; the detector must not depend on language.")
        elif target.startswith("detector.backbones.auto_backbone"):
            found.append(f"{file}:{line} imports {target}, and with it transformers.")
        elif other is not None and other not in MAY_IMPORT[layer] | {layer}:
            found.append(f"{file}:{line} imports {target}; layer '{layer}' must not import layer '{other}'.")
    return found


FORBIDDEN = [
    ("detector/boxes.py", "from e2e_vl.structures import Batch"),
    ("detector/boxes.py", "import transformers"),
    ("detector/faster_rcnn.py", "from detector.backbones.auto_backbone import TransformersBackbone"),
    ("e2e_vl/text.py", "def late():\n    from e2e_vl.model import VisionLanguageModel"),
    ("e2e_vl/data/refcoco.py", "from e2e_vl.metrics import refcoco"),
    ("e2e_vl/tasks/refcoco.py", "from e2e_vl.encoders.vl_bert import VLBertModel"),
    ("e2e_vl/run/build.py", "import detectron2"),
]


def test_imports_go_down() -> None:
    assert [len(violations(file, source)) for file, source in FORBIDDEN] == [1] * len(FORBIDDEN)
    assert not (found := [line for file, source in sources().items() for line in violations(file, source)]), found
    layers = list(MAY_IMPORT)
    assert all(MAY_IMPORT[layer] <= set(layers[:number]) for number, layer in enumerate(layers))


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    module_of = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in sources()}
    known = set(module_of.values())
    graph: dict[str, set[str]] = {}
    for file, source in sources().items():
        targets = {target if target in known else target.rpartition(".")[0] for _, target in imports(source)}
        graph[module_of[file]] = targets & known - {module_of[file]}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_files_stay_readable() -> None:
    lengths = {file: len(source.splitlines()) for file, source in sources().items()}
    assert not (long := {file: length for file, length in lengths.items() if length > MAX_LINES}), long


# Names of tasks, data sets and encoders

HOMES = ("tasks", "data", "encoders", "weights", "synthetic", "metrics")  # folders with a file for each
# Lists of names: the table of the parts and of the writers of synthetic data, and experiments that compare runs.
LISTS = ("e2e_vl/registry.py", "tools/")
# File formats of features and weights have the names of the projects that published them.
LISTS += ("e2e_vl/cli/extract.py", "e2e_vl/run/build.py")
COMMON_WORDS = {"none", "captions", "detection", "joined"}  # also other values than names of parts


def strays(file: str, source: str, names: set[str]) -> list[str]:
    """A message for each name of a part in a file that does not belong to it."""
    parts = PurePosixPath(file).parts
    if file.startswith(LISTS) or (parts[0] == "e2e_vl" and parts[1] in HOMES):
        return []
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"{file}:{node.lineno} has the name '{node.value}'."
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names and id(node) not in docstrings
    ]


def test_names_of_parts_stay_in_their_own_files() -> None:
    names = {*TASKS, *DATASETS, *ENCODERS} - COMMON_WORDS
    found = [line for file, source in sources().items() for line in strays(file, source, names)]
    assert not found, "\n".join(found)
    assert len(strays("e2e_vl/model.py", 'if task == "vqa":\n    pass', names)) == 1
