"""The command line: what is answered before slow imports, errors of one sentence, and small commands."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest

from detector.errors import StoppedRunError, UserError
from e2e_vl import __version__
from e2e_vl.cli import explore, synthesize
from e2e_vl.cli.main import COMMANDS, main, print_errors
from e2e_vl.config_files import load_config, save_config
from e2e_vl.explorer.hosts import allowed_hosts
from tests.conftest import ROOT

IMPORTED = ("benchmark", "official_vl_bert")  # the latter is a module of the former, which needs torch for its help
SCRIPTS = sorted(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py") if path.stem not in IMPORTED)
SLOW = ("torch", "torchvision", "transformers", "accelerate", "matplotlib", "tensorboard", "scipy")

# Runs the module or the scripts as __main__, one after the other, and says what each left behind.
CALLS = f"""
import contextlib, io, json, runpy, sys
answers = []
for name, *words in json.loads(sys.argv[1]):
    sys.argv, said, status = [name, *words], io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run = runpy.run_path if name.endswith(".py") else runpy.run_module
            run(name, run_name="__main__")
        except SystemExit as stopped:
            status = stopped.code
    answers.append([status or 0, said.getvalue(), [library for library in {SLOW} if library in sys.modules]])
print(json.dumps(answers))
"""
REQUIRED = {
    "download": "x",
    "check-data": "--config x",
    "train": "--config x",
    "evaluate": "--run x",
    "score": "x --data x --split x",
    "predict": "--run x --split x --boxes gt --output x",
    "ask": "--run x --image x --text x",
    "explore": "--run x",
    "extract": "x --output x",
    "detect": "x --model x --output x",
    "import-features": "ban x --ids x --output x",
    "analyze-attention": "--run x",
    "probe": "--run x",
    "convert": "x --output x",
    "convert-annotations": "x --output x",
    "export": "--run x --output x",
    "reproduce": "x",
    "synthesize": "--output x",
}
TINY = "configs/tiny/refcoco.yaml"
NEAR = "there is no setting 'train.learning_rate'; train has images_per_batch, "
WRONG = {  # words after e2e-vl -> part of the one sentence
    f"train --config {TINY} train.learning_rate=1": NEAR,
    f"train --config {TINY} --train.lr 1e-3": "a setting has no dashes: train.lr=1e-3.",
    f"train --config {TINY} --rseume": "There is no option --rseume; did you mean --resume?",
    "ask --run x --json nope.json": f"nope.json: no such file in {ROOT}; check the path.",
    f"train --config {TINY} output=docs": "docs contains other files, but no run; choose another `output`",
    f"train --config {TINY} detector.overrides.MODEL.RESNETS.DEPHT=50": "MODEL.RESNETS.DEPHT",
    f"train --config {TINY} task.name=refcco": "name 'refcco' is unknown; there is refcoco",
    "train --config pyproject.toml": "pyproject.toml",
    "train --config tiny/refcco": "there is no such config; did you mean tiny/refcoco",
    f"check-data --config {TINY} train.learning_rate=1": NEAR,
    f"check-data --config {TINY} --with nowhere.yaml": "nowhere.yaml",
    "download refcocoo": "did you mean 'refcoco'?",
    "evaluate --run RUN train.learning_rate=1": NEAR,
    "evaluate --run nowhere": "nowhere does not exist",
    "analyze-attention --run RUN --min-iou 2": "min_iou",
    "analyze-attention --run RUN --heads ten": "write a head as LAYER-HEAD",
    "predict --run RUN --split val --boxes gt --output x train.learning_rate=1": NEAR,
    "ask --run nowhere --image README.md --text y": "nowhere does not exist",
    "ask --run x --image x": "--image with --text, or --json",
    "ask --run x --json README.md": "README.md",
    "ask --run x --image configs --text y": "configs: no images found",
    "ask --run RUN --image README.md --text y --boxes 3,2,1": "[3.0, 2.0, 1.0] is not a box",
    "extract x.jpg --output x --text y": "--text needs --run",
    "extract configs --output x": "configs: no images found; supported suffixes are ",
    "convert x --output y train.lr=1": "train.lr=1: settings need --run.",
    "synthesize --output x --min-objects 12": "min_objects",
    f"convert README.md --run {TINY} --output y train.learning_rate=1": NEAR,
}
HELP = {" ".join(("e2e-vl", *words)): [*words, "--help"] for words in ([], *([name] for name in COMMANDS))}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str, list[str]]]:
    """Words -> exit status, what was printed, and the slow libraries that were imported."""
    run = tmp_path_factory.mktemp("run")  # it is taken for a run until its settings are read
    (run / "model").mkdir()
    save_config(load_config(ROOT / TINY), run / "model" / "config.yaml")
    calls = {usage: ["e2e_vl", *words] for usage, words in HELP.items()}
    calls |= {script: [script, "--help"] for script in SCRIPTS}
    calls["positional"] = ["e2e_vl", "ask", "demo", "photo.jpg", "the small circle"]
    calls |= {words: ["e2e_vl", *words.split()] for words in ("train demo/refcoco", "score boxes.json")}
    calls |= {name: ["e2e_vl", name, *words.split(), "--nonsense"] for name, words in REQUIRED.items()}
    calls["trian"] = ["e2e_vl", "trian"]
    calls |= {words: ["e2e_vl", *words.replace("RUN", str(run)).split()] for words in WRONG}
    line = [sys.executable, "-c", CALLS, json.dumps(list(calls.values()))]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    return dict(zip(calls, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("usage", [*HELP, *SCRIPTS])
def test_help(answers, usage):
    status, printed, imported = answers[usage]
    assert (status, imported) == (0, []) and f"usage: {usage.removeprefix('tools/')} " in printed


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"e2e-vl {__version__}\n"


def test_an_unknown_command_is_answered_with_the_known_ones(answers):
    status, printed, imported = answers["trian"]
    assert (status, imported) == (2, []) and all(name in printed for name in COMMANDS)
    assert "The command 'trian' is unknown" in printed and "did you mean 'train'?" in printed


def test_what_a_call_lacks_is_said_with_an_example(answers):
    status, printed, imported = answers["positional"]
    assert (status, imported) == (2, [])
    assert printed.startswith(
        "error: the following arguments are required: --run; did you mean --run demo?\n"
        "example: e2e-vl ask --run RUN --image"
    )
    assert "--config; did you mean --config demo/refcoco?\n" in answers["train demo/refcoco"][1]
    assert "did you mean" not in answers["score boxes.json"][1]  # which comes without an option


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_option_is_answered_at_once(answers, name):
    status, printed, imported = answers[name]
    assert (status, imported) == (2, [])
    assert "--nonsense" in printed.rstrip().rpartition("error: ")[2] and "usage: " not in printed


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_one_sentence_at_once(answers, words):
    status, printed, imported = answers[words]
    assert (status, imported) == (2, [])
    assert printed.startswith("error: ") and printed.strip().count("\n") == 0 and WRONG[words] in printed


# Which errors become one sentence, and which keep their traceback


@print_errors
def command(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UserError("f.json: record 3 has no 'id'"), "f.json: record 3 has no 'id'"),
        (FloatingPointError("a loss is NaN"), "a loss is NaN"),
        (OSError(errno.ENOSPC, "No space left", "f.json"), f"[Errno {errno.ENOSPC}] No space left: 'f.json'"),
        (MemoryError(), "MemoryError: out of memory, or the system gave no reason."),
        (ConnectionError(), "ConnectionError: out of memory, or the system gave no reason."),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(error: Exception, words: str, capsys: pytest.CaptureFixture):
    assert command(error) == 2
    assert capsys.readouterr().err == f"error: {words}\n"


def test_a_stopped_run_has_the_status_of_its_signal(capsys):
    assert command(StoppedRunError("--resume continues", 130)) == 130
    assert capsys.readouterr().err == "--resume continues\n"


def test_a_command_that_a_signal_stops_says_what_to_do(capsys, monkeypatch):
    def killed() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    def interrupted() -> int:
        raise KeyboardInterrupt

    assert print_errors(killed, advice="Repeat the command.")() == 143
    assert print_errors(interrupted, advice="Repeat the command.")() == 130
    said = "stopped by SIGTERM. Repeat the command.\nstopped by SIGINT. Repeat the command.\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "1")
    assert print_errors(interrupted)() == 130 and not capsys.readouterr().err, "one process says it"


def test_a_process_that_lost_another_one_ends_without_a_traceback(capsys, monkeypatch):
    error = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:33")
    with pytest.raises(RuntimeError):
        command(error)
    monkeypatch.setenv("RANK", "1")
    assert command(error) == 75
    assert capsys.readouterr().err == "error: process 1 stops because another process has ended.\n"


@pytest.mark.parametrize("error", [KeyError("id"), TypeError("no number"), OSError("of a library"), AssertionError()])
def test_faults_of_the_program_keep_their_traceback(error: Exception):
    with pytest.raises(type(error)):
        command(error)


# Commands whose parts have tests of their own


def test_the_page_is_open_to_this_machine_only_unless_that_is_asked_for(capsys):
    assert all(map(explore.is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(explore.is_loopback, ("0.0.0.0", "::", "192.168.1.7", "localhost.example.org", "")))
    assert [allowed_hosts(host)[-1] for host in ("127.0.0.1", "::1", "0.0.0.0")] == ["127.0.0.1", "::1", "*"]
    assert explore.main(["--run", "nowhere", "--host", "0.0.0.0"]) == 2
    assert "--open-to-network" in capsys.readouterr().err


def test_without_a_run_or_gradio_the_remedy_is_said(tmp_path, monkeypatch, capsys):
    assert explore.main(["--run", "nowhere/at/all"]) == 2
    assert "nowhere/at/all" in capsys.readouterr().err
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")  # the command sets it, and this restores it
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.yaml").touch()
    assert explore.main(["--run", str(tmp_path)]) == 2
    assert 'pip install "e2e-vl[explore]"' in capsys.readouterr().err


def test_options_say_what_is_drawn(tmp_path, capsys):
    words = f"--output {tmp_path / 'data'} --train 3 --val 1 --testA 1 --testB 1 --max-objects 6".split()
    words += ["--families", "attribute=0.5", "relation=0.5"]
    assert synthesize.main(words) == 0
    statistics = json.loads(capsys.readouterr().out)
    assert statistics["images"] == {"train": 3, "val": 1, "testA": 1, "testB": 1}
    assert set(statistics["families"]) <= {"attribute", "relation"}
    assert 5 <= statistics["objects_per_image"] <= 6
    words[1] = str(tmp_path / "pale")
    words += ["--blur", "1", "--contrast", "0.3", "--brightness", "40", "--noise", "8", "--palette", "red=10,200,190"]
    assert synthesize.main(words) == 0
    assert json.loads(capsys.readouterr().out) == statistics
    settings = json.loads((tmp_path / "pale" / "synthetic.json").read_text("utf-8"))["settings"]
    palette = {"red": [10, 200, 190]}
    assert settings["rendering"] == {"blur": 1, "contrast": 0.3, "brightness": 40, "noise": 8, "palette": palette}
