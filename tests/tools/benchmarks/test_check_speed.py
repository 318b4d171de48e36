from __future__ import annotations

import json

import benchmark as tool


def test_generated_files_are_read_and_their_broken_records_found(tmp_path, capsys):
    output = tmp_path / "speed.json"
    words = ["check", "--folder", str(tmp_path / "files"), "--share", "0.002", "--json", str(output)]
    words += ["--kinds", "expressions", "questions"]
    assert tool.main(words) == 0
    assert "| expressions | 280 | 1 |" in capsys.readouterr().out
    expressions, questions = json.loads(output.read_text())["cases"]
    assert (expressions["texts"], questions["texts"]) == (
        280,
        887 + 428 - 2,
    )  # three expressions are about the empty box
    # the empty box, by the ref to it; the annotation without answers and its question, in both splits
    assert (expressions["problems"], questions["problems"]) == (1, 4)
    assert questions["mib"] > 100 and questions["own_seconds"] > 0 and expressions["seconds"] > 0
    assert questions["forked_seconds"] == 0, "so little is done by one process"
    assert tool.main([*words[:3], "--share", "2"]) == 2
