"""`benchmark.py ask` on a tiny run."""

from __future__ import annotations

import json

import pytest

import benchmark


def test_answers_are_timed(trained_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    [record, *_] = json.loads((trained_run.path / "predictions_val_gt.json").read_text("utf-8"))
    words = ["ask", "--run", str(trained_run.path), "--image", record["file_name"], "--text", record["sent"]]
    assert benchmark.main([*words, "--repetitions", "2", "--json", str(tmp_path / "ask.json")]) == 0
    result = json.loads((tmp_path / "ask.json").read_text())
    seconds = result["seconds"]
    assert set(seconds) == {"load", "first", "next", "each_of_many", "command"} and min(seconds.values()) > 0
    assert seconds["next"] < seconds["command"] and result["mib"] > 100
    assert "each of 2 questions in one call" in capsys.readouterr().out


def test_a_run_that_is_not_there(tmp_path, trained_run, capsys):
    image = tmp_path / "no.jpg"
    assert benchmark.main(["ask", "--run", str(trained_run.path), "--image", str(image), "--text", "star"]) == 2
    assert "no.jpg is no file" in capsys.readouterr().err
    image.write_bytes(b"")
    with pytest.raises(RuntimeError, match="Asking failed"):
        benchmark.main(["ask", "--run", str(tmp_path), "--image", str(image), "--text", "star"])
