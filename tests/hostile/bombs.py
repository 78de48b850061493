"""Input that asks for memory or time. Made and described as in `rows`, and opened in a process of its own."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forge import Raw, Tensor, Zip, global_, parts, pickled, text, write
from tests.hostile.checkpoints import TAG
from tests.hostile.real import described, real, written
from tests.hostile.rows import LAUGHS, LEGACY, MODEL, OPTIM0, Row, file, pickle_of, states


def sparse(size: int, head: bytes) -> Callable[[Path], object]:
    """A file of `size` bytes of which only the first are written."""

    def make(path: Path) -> None:
        path.write_bytes(head)
        os.truncate(path, size)

    return make


def members(count: int, **changes: Any) -> bytes:
    """An archive of so many empty storages."""
    return Zip(parts(pickled({}), {f"{index:x}": b"" for index in range(count - 3)}), zip64=True, **changes).write()


def many(count: int, **more: Any) -> bytes:
    """A model file that names so many parameters of one element."""
    each = [text(f"layer.{index}.weight") + b"h\0" for index in range(count)]
    batches = b"".join(b"(" + b"".join(each[at : at + 1000]) + b"u" for at in range(0, count, 1000))
    rest = {"module": {}, "ds_version": "0.19.8", **more}
    return pickle_of(b"\x80\x02K\1\x85q\x000" + pickled(rest)[2:-1] + text("param_shapes") + b"]}" + batches + b"as.")


def bomb(body: bytes, head: bytes = b"\x80\x02") -> Callable[[Path], Path]:
    """A model file whose pickle is this."""
    return file(pickle_of(head + body + b"."))


CALL = b"cos\nsystem\nq\x00(U\x02idtq\x01"
TENSOR = global_("torch._utils", "_rebuild_tensor_v2") + b"q\x00"
VIEW = pickled(Tensor("0", (), numel=6).call().args)[2:-1] + b"q\x01"
WIDE = text("\U0001f600" + "a" * 60_000)

VALUES = "describes more than 1000000 values"


def names(count: int) -> bytes:
    """A dict of so many parameters, as opcodes."""
    return b"}(" + b"".join(text(f"p{index}") + b")" for index in range(count)) + b"u"


def numbers(count: int) -> bytes:
    """A list of so many zeros, as opcodes."""
    return b"](" + b"K\0" * count + b"e"


def pattern(pattern: str) -> Callable[[Path], Path]:
    """A tensor-parallel checkpoint whose metadata has a pattern, and a name for it to be searched in."""

    def make(root: Path) -> Path:
        files = dict(described("j_z1_autotp_w4"))
        info = {"tp_replicated_parameter_patterns": [pattern]}
        for rank in range(2):
            name = f"mp_rank_{rank:02d}_model_states.pt"
            value = files[name]
            renamed = {"a" * 1000: next(iter(value["param_shapes"][0].values()))}
            groups = [renamed | dict(list(value["param_shapes"][0].items())[1:]), *value["param_shapes"][1:]]
            module = {
                "a" * 1000 if key == next(iter(value["param_shapes"][0])) else key: item
                for key, item in value["module"].items()
            }
            files[name] = {**value, "universal_checkpoint_info": info, "param_shapes": groups, "module": module}
        written(root / TAG, files)
        return root / TAG / MODEL

    return make


def safetensors(root: Path, header: bytes) -> Path:
    """A directory without a checkpoint, but with a weight file of that header."""
    write(root / "model.safetensors", struct.pack("<Q", len(header)) + header)
    return root


BOMBS: dict[str, Row] = {
    "01 deep nesting": Row(bomb(b"]" * 190_000 + b"a" * 189_999), "expected a dict in the file, found list"),
    "02 deeper nesting": Row(bomb(b"(" * 1_000_000), "nests deeper than any checkpoint does"),
    "03 nested tuples": Row(bomb(b")" + b"\x85" * 2_200_000), "objects of more than|more steps"),
    "04 billion laughs in the memo": Row(bomb(LAUGHS[2:]), "expected a dict in the file, found list"),
    "05 billion laughs as the key of a dict": Row(bomb(b"}" + LAUGHS[2:] + b"Ns"), "`module` is empty"),
    "06 billion laughs where a count should be": Row(
        states(OPTIM0, optim={"partition_count": Raw(LAUGHS[2:])}), "describes more than 1000000 values"
    ),
    "07 a string of 4 GB": Row(bomb(b"X\xff\xff\xff\xff"), "the pickle ends early"),
    "08 a string of 4 GB that is there": Row(
        file(sparse((5 << 30), LEGACY[:-32].replace(text("storage"), b"X\xff\xff\xff\xff"))), "more than 1073741824 bytes"
    ),
    "09 a string of 2**64 bytes": Row(bomb(b"\x8d" + b"\xff" * 8), "the pickle ends early"),
    "10 an endless loop of REDUCE": Row(bomb(CALL + b"]" + b"h\0h\1Ra" * 600_000), "more steps|objects of more than"),
    "11 REDUCE of REDUCE": Row(bomb(CALL + b"h\0" + b"h\1R" * 600_000), "more steps|objects of more than"),
    "12 tensors without end": Row(bomb(TENSOR + VIEW + b"]" + b"h\0h\1Ra" * 600_000), "more steps|objects of more"),
    "13 dicts without end": Row(bomb(b"]" + b"}NNsa" * 700_000), "more steps|objects of more than"),
    "14 lists copied without end": Row(
        bomb(b"c__builtin__\nset\nq\0](" + b")" * 190_000 + b"e\x85q\1]" + b"h\0h\1Ra" * 500_000), "more steps|objects of"
    ),
    "15 dicts out of pairs without end": Row(
        bomb(b"ccollections\nOrderedDict\nq\0](" + b"KKKK\x86" * 50_000 + b"e\x85q\1]" + b"h\0h\1Ra" * 500_000),
        "more steps|objects of more than",
    ),
    "16 a memo without end": Row(bomb(b"N" + b"\x94" * 2_200_000), "more steps|objects of more than"),
    "17 text four times as wide as written": Row(bomb(b"](" + WIDE * 700 + b"e"), "objects of more than"),
    "18 integers of 64 KB": Row(bomb(b"](" + (b"\x8b\0\xff\0\0" + b"\x7f" * 0xFF00) * 2200 + b"e"), "objects of more"),
    "19 a class name of kilobytes in a million objects": Row(
        bomb(b"c" + b"m" * 60_000 + b"\nn\nq\0]" + b"h\0)Ra" * 1000), "by a name of 60000 characters"
    ),
    "20 keys of one hash": Row(
        bomb(b"}(" + b"".join(b"\x8a\x0b" + (k * ((1 << 61) - 1)).to_bytes(11, "little") + b"N" for k in range(60_000))
             + b"u"), "`module` is empty"
    ),
    "21 tuples of one hash": Row(
        bomb(b"}(" + b"".join(b"J" + struct.pack("<i", k) + b"G" + struct.pack(">d", k * 2.0**61) + b"\x86N" for k in range(60_000))
             + b"u"), "`module` is empty"
    ),
    "22 numbers without end": Row(bomb(b"]" + (b"(" + b"K\1" * 1000 + b"e") * 70_000), "more steps"),
    "23 nothing without end": Row(bomb(b"N" + b"2" * 10 + b"N0" * 1_200_000), "more steps"),
    "24 a million members": Row(file(members(150_000, lies={"count": 1_000_000})), "1000000 members"),
    "25 as many members as there may be": Row(file(members(150_000)), "`module` is empty"),
    "26 a directory of 4 GB": Row(
        file(Zip(parts(pickled({})), zip64=True, lies={"size": 4 << 30}).write()), "4294967296 bytes is more than any"
    ),
    "27 parameters without end": Row(file(many(450_000)), "more steps|objects of more than"),
    "28 more parameters than any model": Row(file(many(210_000)), "`param_shapes` has 210000 entries, more than any model"),
    "29 as many parameters as there may be": Row(
        lambda root: file(many(190_000))(root).with_name(OPTIM0), "expected 190000 elements of parameters"
    ),
    "30 one dict in a list a million times": Row(
        states(model={"param_shapes": Raw(b"]" + names(1000) + b"q\x000(" + b"h\x00" * 190_000 + b"e")}), VALUES
    ),
    "31 one list of paddings for every group": Row(
        states(OPTIM0, optim={"param_alignment_paddings": Raw(numbers(50_000) + b"q\x000](" + b"h\x00" * 60_000 + b"e")}), VALUES
    ),
    "32 as many experts as there are numbers": Row(
        real("h_z2_moe_ep2_w4", MODEL, {"num_experts": [1 << 40] * 50_000}), "counts 3276800000 experts, more than any model"
    ),
    "33 layers of experts without end": Row(
        real("h_z1_autoep_ep2_w4", MODEL, {"ds_autoep_layers": [{"num_experts": 60_000, "ep_size": 1, "expert_key_prefix": "e"}] * 20_000}),
        "has 20000 layers of",
    ),
    "34 a pattern that never ends": Row(pattern(r"(a|a)" * 400 + "b"), "where a simple pattern of names was expected"),
    "35 another": Row(pattern(r"(a+)+b"), "where a simple pattern of names was expected"),
    "36 and another": Row(pattern(r".*.*.*.*b"), "could take too long"),
    "37 a universal checkpoint of 2**62 ranks": Row(
        real("l_a_z3_bf16_w2_universal", "zero/optimizer_state.pt", {"partition_count": 1 << 62}), "a number of ranks"
    ),
    "38 weights deep in brackets": Row(
        lambda root: safetensors(root, b"[" * 500_000), "a weight file that cannot be read: .* its header is no JSON object"
    ),
    "39 weights of nothing but brackets": Row(
        lambda root: safetensors(root, b"[" + b"[]," * 7_000_000 + b"[]]"), "describes more than any model; refused"
    ),
}  # fmt: skip
