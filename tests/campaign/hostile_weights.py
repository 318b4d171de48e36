"""Hostile weights, refs and states of trainings: pickles, files of torch, safetensors."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save

from tests.campaign.hostile_parts import HUGE, Builder, Touch, rewritten, torch_bytes, written

# Pickles: the bytes of one; `pickles` reads them as weights and as refs

PICKLES: dict[str, bytes] = {
    "empty": b"",
    "frame_of_terabytes": b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b"}.",
    "bytes8_of_terabytes": b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"abc.",
    "text8_of_terabytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
    "byte_array8_of_terabytes": b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b"abc.",
    "text_of_gigabytes": b"\x80\x02X\xff\xff\xff\xffabc.",
    "string_of_negative_length": b"\x80\x02T\xff\xff\xff\xffabc.",
    "number_of_gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "number_of_a_megabyte": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
    "number_of_a_million_digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "memo_of_gigabytes": b"\x80\x02]r\xff\xff\xff\x7f.",
    "memo_of_gigabytes_in_text": b"]p4294967295\n.",
    "memo_of_no_number": b"]p-1\n.",
    "doubled_things": b"\x80\x02](" + b"N" + b"2" * 3_000_000 + b"e.",
    "lists_in_lists": b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b".",
    "many_lists": b"\x80\x02](" + b"]" * 9_000_000 + b"e.",
    "many_dicts": b"\x80\x02](" + b"}NNs" * 3_000_000 + b"e.",
    "tuples_in_tuples": b"\x80\x02)" + b"\x85" * 500_000 + b".",
    "tuples_in_tuples_as_key": b"\x80\x02})" + b"\x85" * 3_000_000 + b"Ns.",
    "doubling_tuple_as_key": b"\x80\x02}Nq\x00" + b"h\x00h\x00\x86q\x00" * 64 + b"Ns.",
    "doubling_tuple_in_a_dict_of_marks": b"\x80\x02Nq\x00" + b"h\x00h\x00\x86q\x00" * 64 + b"(h\x00Nd.",
    "doubling_tuple_in_a_set": b"\x80\x04\x8f(Nq\x00" + b"h\x00h\x00\x86q\x00" * 64 + b"\x90.",
    "doubling_lists": b"\x80\x02]q\x00" + b"](h\x00h\x00eq\x00" * 64 + b".",
    "long_key_again_and_again": b"\x80\x02}X" + struct.pack("<I", 1 << 20) + b"k" * (1 << 20) + b"N)\x85q\x010s.",
    "numbers_with_one_hash": b"\x80\x02})\x85q\x00("
    + b"".join(b"\x8a\x10" + (n * ((1 << 61) - 1)).to_bytes(16, "little") + b"N" for n in range(2, 60_000))
    + b"u.",
    "extension_code": b"\x80\x02\x82\x01.",
    "outer_buffer": b"\x80\x05\x97.",
    "persistent_id": b"\x80\x02NQ.",
    "no_opcode": b"\x80\x02}\xff\xff.",
    "pops_too_much": b"\x80\x02)\x850000\x85\x85ue.",
    "cut_off": pickle.dumps({"a": list(range(1000))})[:-30],
}


def _reduces(head: bytes, times: int) -> bytes:
    """A pickle that names one thing of a megabyte again and again."""
    return b"\x80\x02" + head + b"](" + b"h\x00h\x01R" * times + b"e."


def _array_pickle(shape: bytes, code: bytes = b"f4", content: bytes = b"1234") -> bytes:
    start = b"\x80\x02}X\x01\x00\x00\x00wcnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\nU" + bytes([len(code)]) + code + b"K\x00K\x01\x87R"
    return start + b"(K\x01" + shape + kind + b"\x89U" + bytes([len(content)]) + content + b"tbs."


def _copied_array(times: int) -> bytes:
    """Some thousand arrays that share one string of a megabyte."""
    size = 1 << 20
    data = b"T" + struct.pack("<i", size) + b"\0" * size + b"q\x00"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87Rq\x01"
    new = b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03"
    one = b"h\x02h\x03K\x00\x85U\x01b\x87R(K\x01J" + struct.pack("<i", size) + b"\x85h\x01\x89h\x00tb"
    return b"\x80\x02(" + data + kind + new + b"l](" + one * times + b"e."


ARRAY_PICKLES: dict[str, bytes] = {
    "array_of_terabytes": _array_pickle(b"\x8a\x06" + HUGE.to_bytes(6, "little") + b"\x85"),
    "array_of_negative_size": _array_pickle(b"J\xff\xff\xff\xff\x85"),
    "array_of_objects": _array_pickle(b"K\x01\x85", b"O8"),
    "array_of_void": _array_pickle(b"K\x01\x85", b"V99"),
    "array_of_subarrays": _array_pickle(b"K\x01\x85", b"(99999999,)f4"),
    "array_of_another_order": _array_pickle(b"K\x01\x85", b">f4"),
    "array_copied_often": _copied_array(4000),
    "text_encoded_often": _reduces(
        b"c_codecs\nencode\nq\x00X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"X\x06\0\0\0latin1\x86q\x010",
        4000,
    ),
    "dict_made_often": _reduces(
        b"ccollections\nOrderedDict\nq\x00]("
        + b"".join(b"J" + struct.pack("<i", n) + b"N\x86" for n in range(20_000))
        + b"e\x85q\x01",
        20_000,
    ),
    "dict_of_tuples": b"\x80\x02ccollections\nOrderedDict\n](Nq\x00"
    + b"h\x00h\x00\x86q\x00" * 64
    + b"Nq\x00\x86e\x85R.",
}


def code(name: str, protocol: int) -> Builder:
    def build(folder: Path, canary: Path) -> Path:
        (folder / name).write_bytes(pickle.dumps({"model": Touch(canary)}, protocol))
        return folder / name

    return build


# Files of torch


def _torch(old: bytes, new: bytes, *, is_zip: bool = True) -> Builder:
    """A saved vector of 7 numbers whose pickle has other bytes in one place."""
    content = torch_bytes({"w": torch.arange(7.0)}, is_zip=is_zip)
    if not is_zip:
        assert old in content
        return written("w.pth", content.replace(old, new))

    def change(name: str, data: bytes) -> bytes:
        assert not name.endswith("data.pkl") or old in data
        return data.replace(old, new) if name.endswith("data.pkl") else data

    return written("w.pth", rewritten(content, change))


def _torch_pickle(data: bytes) -> Builder:
    content = torch_bytes({"w": torch.arange(7.0)})
    return written("w.pth", rewritten(content, lambda name, old: data if name.endswith("data.pkl") else old))


def _torch_code(folder: Path, canary: Path) -> Path:
    torch.save({"w": torch.zeros(1), "x": Touch(canary)}, folder / "w.pth")
    return folder / "w.pth"


def _torch_bomb(folder: Path, canary: Path) -> Path:
    """A storage of 128 MiB of zeros, packed to 128 KiB."""
    content = torch_bytes({"w": torch.arange(7.0)})
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(folder / "w.pth", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            with new.open(name, "w") as member:
                if name.endswith("data/0"):
                    for _ in range(32):
                        member.write(bytes(1 << 22))
                else:
                    member.write(old.read(name))
    return folder / "w.pth"


_WHOLE = torch_bytes({"w": torch.arange(7.0)})
_SIZES = b"K\x00K\x07\x85q\x08K\x01\x85q\t"  # offset 0, shape [7], stride [1]


_MANY = b"(" + b"K\x01" * 100_000 + b"t"  # dimensions, of which torch makes a tensor in minutes


def _sizes(offset: bytes, size: bytes, stride: bytes) -> bytes:
    return offset + size + b"\x85q\x08" + stride + b"\x85q\t"


def _long(number: int) -> bytes:
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)


def _two_directories(evil: bytes) -> Builder:
    """A whole file behind an evil one; the stated offset, which torch reads, is the evil one's directory."""

    def split(content: bytes) -> tuple[bytes, bytes, int]:
        count, size, offset = struct.unpack_from("<HII", content, content.rindex(b"PK\5\6") + 10)
        return content[:offset], content[offset : offset + size], count

    (evil_body, evil_entries, count), (body, entries, _) = split(evil), split(rewritten(_WHOLE, lambda name, old: old))
    assert len(evil_entries) == len(entries)
    moved, at = b"", 0
    while at < len(entries):  # what reads the entries before the end adds the distance of the two directories
        end = at + 46 + sum(struct.unpack_from("<3H", entries, at + 28))
        offset = struct.unpack_from("<I", entries, at + 42)[0] + len(evil_body) - len(body)
        moved += entries[at : at + 42] + struct.pack("<I", offset) + entries[at + 46 : end]
        at = end
    tail = b"PK\5\6" + bytes(4) + struct.pack("<HHIIH", count, count, len(moved), len(evil_body), 0)
    return written("w.pth", evil_body + evil_entries + body + moved + tail)


def _evil_pickle(data: bytes) -> Builder:
    # so long that no offset in the other directory becomes negative
    longer = b"\x80\x02" + b"N0" * 300 + data
    return _two_directories(rewritten(_WHOLE, lambda name, old: longer if name.endswith("data.pkl") else old))


TORCH: dict[str, Builder] = {
    "empty": written("w.pth", b""),
    "text": written("w.pth", b"<html>not found</html>" * 99),
    "cut_off": written("w.pth", _WHOLE[:-300]),
    "cut_in_the_middle": written("w.pth", _WHOLE[:400]),
    "without_pickle": written("w.pth", rewritten(_WHOLE, lambda name, data: None if name.endswith(".pkl") else data)),
    "without_storage": written("w.pth", rewritten(_WHOLE, lambda name, data: None if name.endswith("/0") else data)),
    "short_storage": written("w.pth", rewritten(_WHOLE, lambda name, data: data[:8] if name.endswith("/0") else data)),
    "packed_storage_bomb": _torch_bomb,
    "storage_of_terabytes": _torch(b"cpuq\x06K\x07", b"cpuq\x06" + _long(HUGE)),
    "storage_a_little_too_long": _torch(b"cpuq\x06K\x07", b"cpuq\x06K\x09"),
    "storage_of_negative_size": _torch(b"cpuq\x06K\x07", b"cpuq\x06" + _long(-1)),
    "shape_of_many_dimensions": _torch(_SIZES, b"K\x00" + _MANY + _MANY),
    "shape_of_terabytes": _torch(_SIZES, _sizes(b"K\x00", _long(HUGE), b"K\x01")),
    "expanded_to_terabytes": _torch(_SIZES, _sizes(b"K\x00", _long(HUGE), b"K\x00")),
    "offset_outside": _torch(_SIZES, _sizes(b"M\xff\xff", b"K\x07", b"K\x01")),
    "negative_offset": _torch(_SIZES, _sizes(_long(-64), b"K\x07", b"K\x01")),
    "negative_stride": _torch(_SIZES, _sizes(b"K\x06", b"K\x07", _long(-1))),
    "stride_outside": _torch(_SIZES, _sizes(b"K\x00", b"K\x07", b"K\x02")),
    "storage_as_type": _torch_pickle(b"\x80\x02ctorch.storage\nUntypedStorage\n" + _long(HUGE) + b"\x85R."),
    "byte_array": _torch_pickle(b"\x80\x02c__builtin__\nbytearray\n" + _long(1 << 34) + b"\x85R."),
    "tensor_as_type": _torch_pickle(b"\x80\x02ctorch\nFloatTensor\n" + _long(1 << 34) + b"\x85R."),
    "set_of_tuples": _torch_pickle(b"\x80\x02c__builtin__\nset\n](Nq\x00" + b"h\x00h\x00\x86q\x00" * 64 + b"e\x85R."),
    "packed_text": _torch_pickle(b"\x80\x02c_codecs\nencode\nX\x02\0\0\0abX\x05\0\0\0punyc\x86R."),
    "two_directories_and_a_byte_array": _evil_pickle(b"c__builtin__\nbytearray\n" + _long(6 << 30) + b"\x85R."),
    "two_directories_and_a_set": _evil_pickle(
        b"c__builtin__\nset\n](Nq\x00" + b"h\x00h\x00\x86q\x00" * 64 + b"e\x85R."
    ),
    "two_directories_and_code": _evil_pickle(b"cos\nsystem\nX\x04\0\0\0true\x85R."),
    "name_of_half_a_character": written("w.pth", torch_bytes({"w\ud800": torch.zeros(1)})),
    "code": _torch_code,
    "code_of_python": _torch_pickle(b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R."),
    "old_code": code("w.pth", 2),
    "old_cut_off": written("w.pth", torch_bytes({"w": torch.arange(7.0)}, is_zip=False)[:-9]),
    "old_storage_of_terabytes": _torch(b"cpuq\x06K\x07", b"cpuq\x06" + _long(HUGE), is_zip=False),
    "old_shape_outside": _torch(b"K\x07\x85", _long(1 << 33) + b"\x85", is_zip=False),
    "old_tar": written("w.pth", b"\x80\x02" + b"\0" * 98 + tarfile.TarInfo("x").tobuf()[100:]),
}


def _safetensors(header: dict | bytes, data: bytes = b"\0" * 28, length: int | None = None) -> Builder:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return written("w.safetensors", struct.pack("<Q", len(text) if length is None else length) + text + data)


def _entry(shape: list[int], ends: list[int], kind: str = "F32") -> dict:
    return {"w": {"dtype": kind, "shape": shape, "data_offsets": ends}}


SAFETENSORS: dict[str, Builder] = {
    "empty": written("w.safetensors", b""),
    "header_of_terabytes": _safetensors(b"{}", length=HUGE),
    "no_json": _safetensors(b"{" * 10_000),
    "deep_json": _safetensors(b'{"w":' + b"[" * 100_000),
    "shape_of_terabytes": _safetensors(_entry([HUGE], [0, 28])),
    "shape_that_overflows": _safetensors(_entry([1 << 33, 1 << 33], [0, 28])),
    "offsets_behind_the_end": _safetensors(_entry([14], [0, 56])),
    "offsets_that_fall": _safetensors(_entry([7], [28, 0])),
    "negative_offsets": _safetensors(_entry([7], [-28, 0])),
    "unknown_type": _safetensors(_entry([7], [0, 28], "OBJECT")),
    "cut_off": _safetensors(_entry([7], [0, 28]), b"\0" * 20),
    "many_dimensions": _safetensors(_entry([1] * 100_000, [0, 4]), b"\0" * 4),
    "dimension_that_overflows": _safetensors(_entry([0, (1 << 64) - 1], [0, 0]), b""),
    "many_tensors": _safetensors({f"w{n}": _entry([0], [0, 0])["w"] for n in range(70_000)}, b""),
    "name_twice": _safetensors(
        (json.dumps(_entry([7], [0, 28]))[:-1] + "," + json.dumps(_entry([7], [0, 28]))[1:]).encode()
    ),
    "packed_numbers": _safetensors(_entry([56], [0, 28], "F4")),
}


def _good_state(folder: Path) -> Path:
    """A state after one step with a model of one weight, as `read_hostile.py` has it; returns its folder."""
    state = folder / "state"
    state.mkdir()
    (folder / "step.json").write_text('{"processes": 1, "step": 1}')
    (state / "model.safetensors").write_bytes(save({"w": torch.zeros(1)}))
    (state / "optimizer.bin").write_bytes(torch_bytes({"state": {0: _moments()}, "param_groups": [{"params": [0]}]}))
    (state / "random_states_0.pkl").write_bytes(torch_bytes({"torch_manual_seed": torch.get_rng_state()}))
    return state


def _moments(**others: object) -> dict[str, object]:
    return {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1), **others}


def _state(name: str) -> Builder:
    """A checkpoint's state, with one file that runs code."""

    def build(folder: Path, canary: Path) -> Path:
        state = _good_state(folder)
        content = torch_bytes({"w": torch.arange(7.0)})
        evil = pickle.dumps(Touch(canary), 2)
        (state / name).write_bytes(rewritten(content, lambda one, old: evil if one.endswith(".pkl") else old))
        return folder

    return build


def _state_claims(name: str) -> Builder:
    def build(folder: Path, canary: Path) -> Path:
        path = _state(name)(folder, canary)
        lying = TORCH["storage_of_terabytes"](folder, canary)
        lying.rename(path / "state" / name)
        return path

    return build


def _state_with(*gone: str, **contents: bytes) -> Builder:
    """A state that lacks some files and has others; "a_bin" is the name of a.bin."""

    def build(folder: Path, canary: Path) -> Path:
        state = _good_state(folder)
        for name in gone:
            (state / name).unlink()
        for name, content in contents.items():
            (state / ".".join(name.rsplit("_", 1))).write_bytes(content)
        return folder

    return build


def _optimizer(moments: dict[int, dict[str, object]]) -> Builder:
    return _state_with(optimizer_bin=torch_bytes({"state": moments, "param_groups": [{"params": [0]}]}))


def _position(text: str) -> Builder:
    def build(folder: Path, canary: Path) -> Path:
        _good_state(folder)
        (folder / "step.json").write_text(text)
        return folder

    return build


def _claiming(pickled: bytes) -> bytes:
    return rewritten(_WHOLE, lambda name, old: pickled if name.endswith("data.pkl") else old)


_BYTE_ARRAY = _claiming(b"\x80\x02c__builtin__\nbytearray\n" + _long(6 << 30) + b"\x85R.")
_NAN = torch.full((1,), float("nan"))
STATES: dict[str, Builder] = {
    "weights_missing": _state_with("model.safetensors"),
    "weights_as_pickle": _state_with("model.safetensors", pytorch_model_bin=_BYTE_ARRAY),
    "weights_as_good_pickle": _state_with("model.safetensors", pytorch_model_bin=torch_bytes({"w": torch.zeros(1)})),
    "scheduler_claims": _state_with(scheduler_bin=_BYTE_ARRAY),
    "sampler_claims": _state_with(sampler_bin=_BYTE_ARRAY),
    "weights_nan": _state_with(model_safetensors=save({"w": _NAN})),
    "moments_nan": _optimizer({0: _moments(exp_avg=_NAN)}),
    "moments_of_another_shape": _optimizer({0: _moments(exp_avg=torch.zeros(99))}),
    "moments_missing": _optimizer({}),
    "moments_of_text": _optimizer({0: _moments(step="many")}),
    "moments_of_no_kind": _optimizer({0: 5}),
    "step_of_text": _position('{"processes": 1, "step": "x"}'),
    "step_negative": _position('{"processes": 1, "step": -5}'),
    "processes_list": _position('{"processes": [1], "step": 1}'),
    "place_negative": _position('{"processes": 1, "step": 1, "place": {"epoch": -1, "images": 0}}'),
    "losses_of_text": _position('{"processes": 1, "step": 1, "loss_sums": {"loss": "x"}}'),
    "optimizer_code": _state("optimizer.bin"),
    "random_code": _state("random_states_0.pkl"),
    "scaler_code": _state("scaler.pt"),
    "optimizer_claims": _state_claims("optimizer.bin"),
    "random_claims": _state_claims("random_states_0.pkl"),
}
