"""`explore`: where the page may be opened from, and what is said before anything slow is loaded."""

from __future__ import annotations

import sys

import pytest

from e2e_vl.cli import explore


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "192.168.1.7", "localhost.example.org", "")),
    ],
)
def test_loopback_addresses(host, expected):
    assert explore.is_loopback(host) == expected


def test_other_machines_are_let_in_only_when_that_is_asked_for(capsys):
    assert explore.main(["--run", "nowhere", "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr().err
    assert "--host 0.0.0.0 lets other machines use this page without a password" in said and "--open-to-network" in said
    explore.check_place("0.0.0.0", 7860, is_open=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--max-megabytes", "0"], "--max-megabytes is 0.0; it must be a positive number"),
        (["--max-megapixels", "nan"], "--max-megapixels is nan"),
        ([], "nowhere/at/all"),
    ],
)
def test_wrong_options_are_one_sentence(words, message, capsys):
    assert explore.main(["--run", "nowhere/at/all", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_without_gradio_the_remedy_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")  # the command sets it, and this restores it
    monkeypatch.setitem(sys.modules, "gradio", None)  # its import fails
    (tmp_path / "model").mkdir()
    for name in ("config.yaml", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    assert explore.main(["--run", str(tmp_path)]) == 2
    assert 'pip install "e2e-vl[explore]"' in capsys.readouterr().err
