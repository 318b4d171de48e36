"""Names of tasks, data sets and encoders stay where they belong; classes, modules and shape letters have their own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("detector", "e2e_vl", "tools")
BUILD = "e2e_vl/run/build.py"
TABLES = ("TASKS", "DATASETS", "ENCODERS")  # dicts in BUILD, name -> classes
EXTRA_NAMES = ("bert",)  # has a weight adapter only
# Folders of e2e_vl/ in which a module or folder may be named after a task, a data set or an encoder.
HOMES = ("tasks", "data", "encoders", "weights", "synthetic", "evaluation")
# Names that are also common values, as in torch's reduction="none" or data.files.captions: they count beside something
# like `encoder.name`.
COMMON_VALUES = ("none", "captions", "detection")
HOLDS_A_NAME = re.compile(r"(\w+_)?(name|task|encoder|dataset)s?")
SHARED_BASENAMES = {"__init__", "base", "structures"}
# One for each data set; and drawn data sets share no arithmetic with what they check.
SHARED_FUNCTIONS = {"write_submission", "box_iou"}
# Where names are what it is about: the list of the writers of drawn data sets, and scripts that compare runs.
NAMING = ("e2e_vl/synthetic/generate.py", "tools/experiments/")
# Region features come in a file format that has the name of the project that published such files first.
NAMING += ("e2e_vl/data/storage/features/", "e2e_vl/cli/extract.py")
SHARED_CODE = ("e2e_vl/weights/base.py", "e2e_vl/weights/start.py")  # of all weight adapters

COMMANDS = "e2e_vl/cli/"

Sources = dict[str, str]  # file, relative to the repository, with forward slashes -> its text


@pytest.fixture(scope="module")
def sources() -> Sources:
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(paths) > 50
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


# Names of tasks, data sets and encoders


def named_classes(build: str) -> dict[str, set[str]]:
    """Name -> the identifiers of its entries in the dicts of engine/build.py."""
    found: dict[str, set[str]] = {name: set() for name in EXTRA_NAMES}
    for node in ast.parse(build).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_table = any(isinstance(target, ast.Name) and target.id in TABLES for target in targets)
        if is_table and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant):
                    identifiers = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
                    found.setdefault(key.value, set()).update(identifiers)
    return found


def is_home(file: str, name: str) -> bool:
    """Whether the file may know the name: its own files, the dicts, and the weight adapters."""
    if file in SHARED_CODE:
        return False
    if file == BUILD or file.startswith(("e2e_vl/weights/", *NAMING)):
        return True
    package, *parts = PurePosixPath(file).with_suffix("").parts
    if package != "e2e_vl" or parts[0] not in HOMES:
        return False
    return name in parts[1:] or (parts[0] in ("encoders", "synthetic") and parts[-1].startswith(name))


def string_constants(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings that may be names: no docstrings, parts of f-strings and help texts of commands."""
    exempt: set[int] = set()
    beside_a_name: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant() as constant):
                exempt.add(id(constant))
            case ast.JoinedStr(values=values):
                exempt.update(map(id, values))
            case ast.keyword(arg="help", value=value) if file.startswith(("tools/", COMMANDS)):
                exempt.update(map(id, ast.walk(value)))
            case ast.Compare() | ast.keyword() | ast.Assign() | ast.AnnAssign():
                identifiers = {getattr(node, "arg", None) or ""}
                for part in ast.walk(node):
                    identifiers.add(getattr(part, "id", None) or getattr(part, "attr", None) or "")
                if any(map(HOLDS_A_NAME.fullmatch, identifiers)):
                    beside_a_name.update(map(id, ast.walk(node)))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in exempt
        if is_text and (node.value not in COMMON_VALUES or id(node) in beside_a_name):
            yield node.lineno, node.value


def strays(sources: Sources) -> list[str]:
    """One sentence for each place that knows a name, or imports its module or classes, and is not its home."""
    classes = named_classes(sources[BUILD])
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, identifiers in classes.items():
        for identifier in identifiers:
            names_of[identifier].append(name)
    found = []
    for file, source in sources.items():
        tree = ast.parse(source, filename=file)
        for line, text in string_constants(file, tree):
            if text in classes and not is_home(file, text):
                found.append(f"{file}:{line} has the name '{text}'.")
        for node in ast.walk(tree):
            keyword = node.arg if isinstance(node, ast.keyword) else None
            if keyword in classes and keyword not in COMMON_VALUES and not is_home(file, keyword):
                found.append(f"{file}:{node.lineno} has the name '{keyword}'.")
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                package, *_, last = f"{getattr(node, 'module', alias.name)}.{alias.name}".split(".")
                owners = [last] if package in PACKAGES and last in classes else names_of.get(alias.name)
                if owners and not any(is_home(file, name) for name in owners):
                    found.append(f"{file}:{node.lineno} imports {alias.name}.")
    return found


def test_names_of_parts_stand_in_their_own_files_only(sources: Sources) -> None:
    classes = named_classes(sources[BUILD])
    assert {"vl_bert", "vqa", "refcoco", "bert"} <= set(classes)
    assert "VLBertModel" in classes["vl_bert"]
    found = strays(sources)
    assert not found, f"{len(found)} places know a name that only its own files may know:\n" + "\n".join(found)


PLANTED_BUILD = """
from e2e_vl.encoders.sight import SightConfig, SightModel
ENCODERS = {"sight": (SightConfig, SightModel)}
TASKS: dict = {"riddle": RiddleTask, "none": (NoConfig, partial(NoTask))}
OTHERS = {"free": Free}
"""


def test_names_are_read_from_the_dicts() -> None:
    assert named_classes(PLANTED_BUILD) == {
        "bert": set(),
        "sight": {"SightConfig", "SightModel"},
        "riddle": {"RiddleTask"},
        "none": {"NoConfig", "NoTask", "partial"},
    }


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("e2e_vl/config.py", "name: str = 'sight'"),
        ("e2e_vl/tasks/other.py", "def f(encoder):\n    return encoder.name == 'sight'"),
        ("e2e_vl/tasks/riddles.py", "x = 'riddle'"),
        ("e2e_vl/tasks/sight.py", "x = 'riddle'"),
        ("e2e_vl/encoders/base.py", "x: Literal['sight', 'y']"),
        ("e2e_vl/run/train.py", "x = {'riddle': 1}"),
        ("e2e_vl/engine/riddle.py", "x = 'riddle'"),
        ("e2e_vl/data/other.py", "x = config.encoder.name == 'none'"),
        ("e2e_vl/data/other.py", "encoder: str = 'none'"),
        ("e2e_vl/data/other.py", "f(task_name='none')"),
        ("e2e_vl/model.py", "x = 'bert'"),
        ("e2e_vl/run/train.py", "x = dict(riddle=1)"),
        ("e2e_vl/engine/other.py", "from e2e_vl.tasks import riddle"),
        ("e2e_vl/engine/other.py", "import e2e_vl.tasks.riddle as r"),
        ("e2e_vl/engine/other.py", "from e2e_vl.encoders import none as n"),
        ("detector/riddle.py", "x = 'riddle'"),
        ("e2e_vl/weights/start.py", "x = 'sight'"),
        ("tools/train.py", "add('--task', default='riddle', help='the task')"),
        ("e2e_vl/cli/train.py", "add('--task', default='riddle', help='the task')"),
        ("e2e_vl/tasks/other.py", "from e2e_vl.encoders.sight import SightModel"),
        ("e2e_vl/engine/other.py", "def f():\n    from e2e_vl.tasks.riddle import RiddleTask as Task"),
    ],
)
def test_a_name_out_of_place_is_found(file: str, source: str) -> None:
    assert len(strays({BUILD: PLANTED_BUILD, file: source})) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("e2e_vl/tasks/riddle.py", "x = 'riddle'"),
        ("e2e_vl/tasks/objectives/riddle.py", "x = 'riddle'"),
        ("e2e_vl/data/riddle.py", "from e2e_vl.tasks.riddle import RiddleTask"),
        ("e2e_vl/synthetic/riddle/words.py", "x = 'riddle'"),
        ("e2e_vl/encoders/sight_layers.py", "x = 'sight'"),
        ("e2e_vl/weights/official.py", "x = 'sight', 'riddle'"),
        ("e2e_vl/synthetic/riddle_writer.py", "x = 'riddle'"),
        ("tools/experiments/table.py", "x = 'riddle'"),
        ("e2e_vl/weights/sight.py", "from e2e_vl.encoders.sight import SightModel"),
        ("e2e_vl/model.py", '"""sight"""\ndef f():\n    "riddle"  # riddle\n'),
        ("e2e_vl/model.py", "x = f'{y}riddle', 'a riddle', 'riddles', 'Riddle', 'free'"),
        ("e2e_vl/model.py", "from e2e_vl.encoders.sight import other"),
        ("e2e_vl/model.py", "from others import riddle"),
        ("e2e_vl/model.py", "f(none=1)"),
        ("e2e_vl/data/riddle.py", "from e2e_vl.tasks import riddle\nx = dict(riddle=1)"),
        ("e2e_vl/model.py", "x = sum(y, reduction='none') if pool == 'none' else found or 'none'"),
        ("tools/train.py", "add('--task', help='riddle')"),
        ("e2e_vl/cli/train.py", "add('--task', help='riddle')"),
    ],
)
def test_a_name_in_its_place_is_allowed(file: str, source: str) -> None:
    assert strays({BUILD: PLANTED_BUILD, file: source}) == []


# Classes and modules


def repeated_classes(sources: Sources) -> list[str]:
    """One line for each name that more than one class has."""
    places = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source, filename=file)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def repeated_functions(sources: Sources) -> list[str]:
    """One line for each name that more than one public function has.

    `SHARED_FUNCTIONS`, packages that pass a function on, and commands are left out.
    """
    places = defaultdict(list)
    for file, source in sources.items():
        if not file.startswith(("tools/", "e2e_vl/cli/")) and not file.endswith("__init__.py"):
            for node in ast.parse(source, filename=file).body:
                if isinstance(node, ast.FunctionDef) and node.name not in SHARED_FUNCTIONS and node.name[0] != "_":
                    places[node.name].append(f"{file}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def repeated_modules(sources: Sources) -> list[str]:
    """One line for each file name that more than one module has; tasks, data sets and encoders may share one.

    Commands, and the scripts in tools/ that call them, may be called like the function that they run.
    """
    places = defaultdict(list)
    for file in sources:
        if file.startswith(COMMANDS) or (file.count("/") == 1 and file.startswith("tools/")):
            continue
        places[PurePosixPath(file).stem].append(file)
    for name in SHARED_BASENAMES | set(named_classes(sources[BUILD])):
        places.pop(name, None)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def test_no_two_classes_share_a_name(sources: Sources) -> None:
    found = repeated_classes(sources)
    assert not found, "Classes that share a name:\n" + "\n".join(found)


def test_no_two_functions_share_a_name(sources: Sources) -> None:
    found = repeated_functions(sources)
    assert not found, "Functions that share a name:\n" + "\n".join(found)
    one = {"detector/a.py": "def load(): ...\ndef _b(): ...", "e2e_vl/__init__.py": "def load(): ..."}
    assert repeated_functions({**one, "e2e_vl/b.py": "def _b():\n    def load(): ..."}) == []
    assert repeated_functions({**one, "e2e_vl/b.py": "def load(): ..."}) == ["load: detector/a.py:1, e2e_vl/b.py:1"]


def test_no_two_modules_share_a_name(sources: Sources) -> None:
    found = repeated_modules(sources)
    assert not found, "Modules that share a name:\n" + "\n".join(found)


def test_a_second_class_of_a_name_is_found() -> None:
    one = {"detector/a.py": "class Box: ...", "e2e_vl/b.py": "class Boxes:\n    class Inner: ..."}
    assert repeated_classes(one) == []
    assert repeated_classes({**one, "tools/c.py": "\nclass Box: ..."}) == ["Box: detector/a.py:1, tools/c.py:2"]
    nested = {**one, "tools/c.py": "def f():\n    class Inner: ..."}
    assert repeated_classes(nested) == ["Inner: e2e_vl/b.py:2, tools/c.py:2"]


def test_a_second_module_of_a_name_is_found() -> None:
    files = ("detector/base.py", "e2e_vl/base.py", "e2e_vl/tasks/riddle.py", "e2e_vl/data/riddle.py", "e2e_vl/boxes.py")
    fine = {BUILD: PLANTED_BUILD, **dict.fromkeys(files, "")}
    assert repeated_modules(fine) == []
    assert repeated_modules({**fine, "e2e_vl/commands/boxes.py": "", "tools/boxes.py": ""}) == []
    assert repeated_modules({**fine, "detector/boxes.py": ""}) == ["boxes: e2e_vl/boxes.py, detector/boxes.py"]


# Shape letters


def legend(docstring: str) -> Iterator[tuple[str, str]]:
    """(letter, meaning) of the block below the line "Shape legend", or of what follows "Shape legend:".

    Raises:
        ValueError: a line that is no entry; the message is the line.
    """
    lines = docstring.splitlines()
    starts = [i for i, line in enumerate(lines) if line.lower().startswith("shape legend")]
    for start in starts:
        end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
        first = re.sub(r"^shape legend( of the whole package.*)?:?\s*", "", lines[start], flags=re.IGNORECASE)
        if first.startswith("see "):
            continue
        if first:
            sentence = re.sub(r"\(.*", "", " ".join([first, *lines[start + 1 : end]]))
            entries = re.split(r",\s+", sentence)
        else:
            block = "\n".join(lines[start + 1 : end])
            indent = len(block) - len(block.lstrip())
            entries = re.split(rf"\n {{{indent}}}(?! )", "\n" + block)[1:]
        for entry in entries:
            found = re.fullmatch(r"([A-Za-z](?:,\s*[A-Za-z])*)\s+(.*)", " ".join(entry.split()))
            if found is None:
                raise ValueError(entry)
            for letter in re.split(r",\s*", found[1]):
                yield letter, found[2]


def meaning_of(text: str) -> str:
    """A legend's text without its trailing notes, in lower case."""
    return " ".join(re.split(r"[;:,=(]", text)[0].lower().split()).rstrip(".")


def letter_table(sources: Sources) -> dict[str, dict[str, list[str]]]:
    """Letter -> meaning -> files."""
    table: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file, source in sources.items():
        if not file.startswith("tools/"):
            try:
                for letter, text in legend(ast.get_docstring(ast.parse(source)) or ""):
                    table[letter][meaning_of(text)].append(file)
            except ValueError as error:
                raise ValueError(
                    f"{file}: the shape legend has the line '{error}'; give a letter and words."
                ) from error
    return table


def ambiguous_letters(sources: Sources) -> str:
    """The letters with several meanings as a table to read."""
    return "\n".join(
        f"{letter}  {meaning}  ({', '.join(files)})"
        for letter, meanings in sorted(letter_table(sources).items())
        for meaning, files in sorted(meanings.items())
        if len(meanings) > 1
    )


SHAPE = re.compile(r'(?:int|float|bool)\d* \[([^]]*)]|(?:Float|Float32|Int64|Bool|Num|Shaped)\[\w+, "([^"]*)"]')


def letters_without_legend(sources: Sources) -> list[str]:
    """One sentence for each shape that is written with letters in a file that names no legend; commands need none."""
    found = []
    for file, source in sources.items():
        is_explained = "shape legend" in (ast.get_docstring(ast.parse(source)) or "").lower()
        for match in SHAPE.finditer("" if is_explained or file.startswith(("tools/", "e2e_vl/cli/")) else source):
            if re.search(r"\b_?[A-Z]\b", match[1] or match[2] or ""):
                line = source[: match.start()].count("\n") + 1
                found.append(f"{file}:{line}: {match[0]}: name a shape legend above, or write words.")
    return found


def test_a_shape_letter_is_in_a_legend(sources: Sources) -> None:
    found = letters_without_legend(sources)
    assert not found, "\n".join(found)
    wrong = ['"""Names: int64 [G, 2]."""', 'x: Bool[Tensor, " _R"]', "# boxes, float32 [N, 4], 1"]
    assert all(letters_without_legend({"e2e_vl/a.py": source}) for source in wrong)
    fine = ['"""Shape legend: see `b.py`.\n"""\n# int64 [N]', "# int64 [texts, 2]", "x = int(y) [N]"]
    assert not any(letters_without_legend({"e2e_vl/a.py": source}) for source in fine)


def test_a_shape_letter_has_one_meaning(sources: Sources) -> None:
    assert {"N", "M", "R", "H"} <= set(letter_table(sources))
    found = ambiguous_letters(sources)
    assert not found, f"Letters with several meanings:\n{found}"


PLANTED_LEGEND = '''"""What this is.

Shape legend
    N     Images of the batch
    h, w  height and width of an image,
          in pixels
    K     classes; background is class K

Not a legend: R regions.
"""
'''


def test_a_legend_is_read() -> None:
    assert list(legend(ast.get_docstring(ast.parse(PLANTED_LEGEND)))) == [
        ("N", "Images of the batch"),
        ("h", "height and width of an image, in pixels"),
        ("w", "height and width of an image, in pixels"),
        ("K", "classes; background is class K"),
    ]
    assert list(legend("Shape legend: N images of the batch, M texts\n(see elsewhere).")) == [
        ("N", "images of the batch"),
        ("M", "texts"),
    ]
    with pytest.raises(ValueError, match="the images"):
        list(legend("Shape legend\n    the images"))


@pytest.mark.parametrize("entry", ["N  images of the batch.", "N   images of the batch = M / 4", "X  anything"])
def test_the_same_meaning_in_two_files_is_allowed(entry: str) -> None:
    assert (
        ambiguous_letters({"detector/a.py": PLANTED_LEGEND, "e2e_vl/b.py": f'"""Shape legend\n    {entry}\n"""'}) == ""
    )


@pytest.mark.parametrize(
    "entry", ["N  images", "N, M  images of the batch and texts", "w  words", "K: foreground classes"]
)
def test_a_letter_with_two_meanings_is_found(entry: str) -> None:
    entry = entry.replace(":", " ")
    letter = entry[0]
    found = ambiguous_letters({"detector/a.py": PLANTED_LEGEND, "e2e_vl/b.py": f'"""Shape legend\n    {entry}\n"""'})
    assert {line[0] for line in found.splitlines()} == {letter}
    assert "detector/a.py" in found
    assert "e2e_vl/b.py" in found
