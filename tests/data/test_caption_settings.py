"""From settings to paths."""

from __future__ import annotations

from e2e_vl.config import DataSettings
from e2e_vl.data.caption_settings import CaptionConfig, corpus_files, data_path, index_folder


def test_a_home_folder_is_understood_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {"captions": "cc/{split}.json", "corpus": "a.doc+{split}.doc"}
    settings = DataSettings(name="captions", root="~/data", files=files)
    root = tmp_path / "data"
    assert data_path(settings, "captions", "val") == root / "cc" / "val.json"
    assert corpus_files(settings, "val") == [root / "a.doc", root / "val.doc"]
    assert index_folder(settings, CaptionConfig()) == root / "index"
    assert index_folder(settings, CaptionConfig(cache="~/cache")) == tmp_path / "cache"
