"""Names of models on the hub, without the hub."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import EntryNotFoundError

from e2e_vl.run import preflight as hub_names
from e2e_vl.run.preflight import check_hub_name, is_on_hub
from e2e_vl.run.train import train


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Addresses that were asked for; nothing is there."""
    found = []

    def refuse(url: str, **_):
        found.append(url)
        raise OSError("nothing there")

    monkeypatch.setattr(hub_names, "get_hf_file_metadata", refuse)
    return found


def test_a_mistyped_folder_is_found_before_drawing_with_one_question(asked, tiny_config, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    config = tiny_config("encoder.weights=weights/bert", f"data.root={tmp_path / 'data'}")
    with pytest.raises(ValueError, match=r"^encoder.weights: weights/bert: neither a .* \(nothing there\)"):
        train(config)
    assert len(asked) == 1 and not (tmp_path / "data").exists() and caplog.text == ""
    (tmp_path / "weights").mkdir()  # now it can only be a path
    with pytest.raises(ValueError, match=r"^encoder.weights: weights/bert: no such weights file or folder"):
        train(config)
    assert len(asked) == 1


def test_what_is_on_the_hub_or_in_the_cache_is_no_finding(asked, monkeypatch):
    assert is_on_hub("org/name") and not is_on_hub("org/name/part") and not is_on_hub("./org")
    monkeypatch.setattr(hub_names, "try_to_load_from_cache", lambda name, file: "x" if file == "vocab.txt" else None)
    check_hub_name("org/name")
    assert asked == []
    monkeypatch.setattr(hub_names, "try_to_load_from_cache", lambda name, file: None)

    def lacks_file(url: str, **_):
        raise EntryNotFoundError("404")

    monkeypatch.setattr(hub_names, "get_hf_file_metadata", lacks_file)
    check_hub_name("org/name")
