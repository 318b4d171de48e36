"""`explore`: where the page may be opened from, and what is said before anything slow is loaded."""

from __future__ import annotations

import importlib.util

from e2e_vl.cli import explore


def test_the_page_is_open_to_this_machine_only_unless_that_is_asked_for(capsys):
    assert all(map(explore.is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(explore.is_loopback, ("0.0.0.0", "::", "192.168.1.7", "localhost.example.org", "")))
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
