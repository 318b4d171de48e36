from __future__ import annotations

import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from detector.torch_files import DamagedTorchFileError, ForbiddenGlobalError, check_torch_file
from tests.campaign.hostile_parts import rewritten, torch_bytes


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def contents() -> dict[str, object]:
    model, optimizer = trained()
    matrix = torch.randn(4, 4)
    numbers = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": {"p": nn.Parameter(torch.randn(3))},
        "types": {str(kind): torch.zeros(3).to(kind) for kind in numbers},
        "views": {"whole": matrix, "row": matrix[1], "turned": matrix.t(), "none": matrix[:0]},
        "positions": {"ids": torch.arange(512).expand(1, -1)},
        "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        "plain": OrderedDict(epoch=3, text="é", rows=[1, 2.5, None, True], size=torch.Size([1, 2]), kind=torch.float32),
    }


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", contents())
def test_what_torch_saves_is_accepted(tmp_path: Path, name: str, is_zip: bool):
    torch.save(contents()[name], tmp_path / "a.pth", _use_new_zipfile_serialization=is_zip)
    check_torch_file(tmp_path / "a.pth")


def refused(tmp_path: Path, content: bytes) -> str:
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(DamagedTorchFileError) as caught:
        check_torch_file(tmp_path / "a.pth")
    return str(caught.value)


def changed(old: bytes, new: bytes) -> bytes:
    """A saved vector of 7 numbers whose pickle says something else in one place."""

    def change(name: str, data: bytes) -> bytes:
        assert not name.endswith("data.pkl") or data.count(old) == 1
        return data.replace(old, new) if name.endswith("data.pkl") else data

    return rewritten(torch_bytes({"w": torch.arange(7.0)}), change)


def test_claims_are_compared_with_the_file(tmp_path):
    assert "its storage '0' claims 36 bytes, and it has 28" in refused(
        tmp_path, changed(b"cpuq\x06K\x07", b"cpuq\x06K\x09")
    )
    shape = b"K\x00K\x07\x85q\x08K\x01\x85"
    for other in (b"K\x01K\x07\x85q\x08K\x01\x85", b"K\x00K\x08\x85q\x08K\x01\x85", b"K\x00K\x07\x85q\x08K\x02\x85"):
        assert "lies outside of its storage" in refused(tmp_path, changed(shape, other))
    assert "a tensor without a storage or a shape" in refused(tmp_path, changed(shape, b"K\x00K\x07\x85q\x08)"))
    expanded = b"K\x00J\xff\xff\xff\x7f\x85q\x08K\x00\x85"
    assert "its tensors would take far more memory" in refused(tmp_path, changed(shape, expanded))


def test_other_files_are_refused(tmp_path):
    whole = torch_bytes({"w": torch.arange(7.0)})
    assert refused(tmp_path, b"") == "it is empty"
    assert "it begins like no file that torch.save writes" in refused(tmp_path, b"<html>")
    assert "directory of its members" in refused(tmp_path, whole[:-30])
    assert "without data.pkl" in refused(
        tmp_path, rewritten(whole, lambda name, data: None if ".pkl" in name else data)
    )
    assert "claims 28 bytes, and it has None" in refused(
        tmp_path, rewritten(whole, lambda name, data: None if name.endswith("/0") else data)
    )
    old = torch_bytes({"w": torch.arange(7.0)}, is_zip=False)
    assert "its storages claim 36 bytes, and it has 32" in refused(tmp_path, old[:-4])


def test_packed_records_may_not_claim_much_more_than_the_file(tmp_path, monkeypatch):
    whole = torch_bytes({"w": torch.zeros(1 << 20)})
    packed = rewritten(whole, lambda _, data: data, zipfile.ZIP_DEFLATED)
    (tmp_path / "a.pth").write_bytes(packed)
    check_torch_file(tmp_path / "a.pth")  # 4 MiB are little
    monkeypatch.setattr("detector.zip_directory.SMALL", 1 << 20)
    assert "its members claim" in refused(tmp_path, packed)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


@pytest.mark.parametrize("is_zip", [True, False])
def test_functions_are_named_and_not_called(tmp_path, monkeypatch, is_zip):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(1), "x": Bomb()}, "a.pth", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ForbiddenGlobalError, match="mkdir"):
        check_torch_file(Path("a.pth"))
    assert not Path("bomb-went-off").exists()


def test_what_torch_reads_without_a_word_is_refused(tmp_path):
    """A flipped bit, another place of the content, and memory that nobody wrote."""
    whole = torch_bytes({"w": torch.arange(7.0)})
    entry = next(
        at for at in range(len(whole)) if whole.startswith(b"PK\1\2", at) and b"/data/0" in whole[at : at + 70]
    )
    header = int.from_bytes(whole[entry + 42 : entry + 46], "little")
    content = whole.index(torch.arange(7.0).numpy().tobytes())
    for place, change, reason in (
        (content + 5, 1, "checksum differs"),
        (header + 28, 4, "checksum differs"),
        (entry + 38, 16, "a folder with content"),
    ):
        damaged = whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]
        (tmp_path / "a.pth").write_bytes(damaged)
        assert (
            not torch.equal(torch.load(tmp_path / "a.pth", weights_only=True)["w"], torch.arange(7.0)) or change == 16
        )
        with pytest.raises(DamagedTorchFileError, match=reason):
            check_torch_file(tmp_path / "a.pth")
    (tmp_path / "a.pth").write_bytes(whole + b"PK\5\6")
    with pytest.raises(DamagedTorchFileError, match="not where the file says"):
        check_torch_file(tmp_path / "a.pth")


def test_a_file_without_checksums_is_accepted(tmp_path):
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes checksums")
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(7.0)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    check_torch_file(tmp_path / "a.pth")
