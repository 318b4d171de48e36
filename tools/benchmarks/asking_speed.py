"""How long a user waits for answers: a model that is loaded once, against one command per question."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from measuring import ROOT, machine_facts, print_machine

# In a process of its own: imports, loading, the first answer, more answers, and its memory.
SCRIPT = """
import json, sys, time
run, image, text, number = *sys.argv[1:4], int(sys.argv[4])
begin = time.perf_counter()
import e2e_vl
model = e2e_vl.load(run)
loaded = time.perf_counter()
model.ask(image, text)
first = time.perf_counter()
for _ in range(number):
    model.ask(image, text)
one_by_one = time.perf_counter()
model.ask([image] * number, text)
together = time.perf_counter()
import psutil
seconds = {"load": loaded - begin, "first": first - loaded, "next": (one_by_one - first) / number}
seconds["each_of_many"] = (together - one_by_one) / number
print(json.dumps({"seconds": seconds, "mib": psutil.Process().memory_info().rss / 2**20}))
"""


def benchmark_asking(run: Path, image: Path, text: str, *, repetitions: int) -> dict[str, Any]:
    """Ask one text about one image again and again.

    Args:
        run: a run directory or a saved model whose task answers texts.
        repetitions: questions after the first one; a third of them, at least one, by a command each.

    Returns:
        `machine`, `settings`, `seconds` (`load`: importing and loading; `first`: the first answer; `next`: each further
        one; `each_of_many`: each of `repetitions` questions in one call; `command`: one call of tools/predict.py ask),
        and `mib`, the resident memory of the process that asks.

    Raises:
        RuntimeError: a process ended with an error.
    """
    run, image = run.resolve(), image.resolve()  # the processes run in another folder
    words = [str(run), str(image), text]
    found = json.loads(_output([sys.executable, "-c", SCRIPT, *words, str(repetitions)]).splitlines()[-1])
    calls = max(repetitions // 3, 1)
    begin = time.perf_counter()
    for _ in range(calls):
        _output([sys.executable, ROOT / "tools" / "predict.py", "ask", "--run", run, "--image", image, "--text", text])
    found["seconds"]["command"] = (time.perf_counter() - begin) / calls
    settings = {"run": str(run), "text": text, "repetitions": repetitions}
    return {"machine": machine_facts(torch.device("cpu")), "settings": settings, **found}


def _output(command: list[Any]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"Asking failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def show(result: dict[str, Any]) -> int:
    """Print a table in Markdown; returns the exit status."""
    print_machine(result["machine"])
    seconds = result["seconds"]
    print(f"| | seconds |\n|---|---:|\n| import and load | {seconds['load']:.2f} |")
    print(f"| first answer | {seconds['first']:.2f} |\n| each further answer | {seconds['next']:.3f} |")
    print(f"| each of {result['settings']['repetitions']} questions in one call | {seconds['each_of_many']:.3f} |")
    print(f"| each call of `tools/predict.py ask`, which loads the model again | {seconds['command']:.2f} |")
    print(f"\n{result['mib']:.0f} MiB resident")
    return 0
