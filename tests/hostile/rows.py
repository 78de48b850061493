"""Broken and hostile input, row by row: how each is made, the file its error has to name, and what it has to say.

`make(root)` writes a checkpoint into `root` and returns the path that the error must begin with.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.forge import Part, Raw, Tensor, Zip, archive, legacy, parts, pickled, text, write
from tests.hostile.checkpoints import TAG, WITHOUT, zero2, zero3
from tests.hostile.real import only, real

MODEL = "mp_rank_00_model_states.pt"
OPTIM0 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@dataclass(frozen=True)
class Row:
    """One row: `told` is a regular expression for the message."""

    make: Callable[[Path], Path]
    told: str


def file(data: bytes | Callable[[Path], object], name: str = MODEL) -> Callable[[Path], Path]:
    """A ZeRO-2 checkpoint in which one file is something else."""

    def make(root: Path) -> Path:
        path = zero2(root) / TAG / name
        path.unlink()
        if callable(data):
            data(path)
        else:
            path.write_bytes(data)
        return path

    return make


def latest(data: bytes) -> Callable[[Path], Path]:
    """A checkpoint whose `latest` holds something else."""
    return lambda root: write(zero2(root) / "latest", data)


def states(name: str = MODEL, **changes: Any) -> Callable[[Path], Path]:
    """A ZeRO-2 checkpoint with other contents in its dicts."""
    return lambda root: zero2(root, **changes) / TAG / name


def named(name: str | bytes) -> Callable[[Path], Path]:
    """A model with a parameter of that name instead of `w`, in `param_shapes` and in `module`."""
    code = Raw(text(name))
    shapes = Raw(b"](}(" + code.code + pickled((2, 3))[2:-1] + text("b") + pickled((2,))[2:-1] + b"ue")
    module = Raw(
        b"}("
        + code.code + pickled(Tensor("0", (2, 3), kind="BFloat16Storage"))[2:-1]
        + text("b") + pickled(Tensor("1", (2,), kind="BFloat16Storage"))[2:-1]
        + b"u"
    )  # fmt: skip

    def make(root: Path) -> Path:
        path = zero2(root) / TAG / MODEL
        value = {"module": module, "buffer_names": [], "param_shapes": shapes, "ds_version": "0.19.8"}
        return write(path, Zip(parts(pickled(value), {"0": bytes(12), "1": bytes(4)})).write())

    return make


def weights(**changes: Any) -> bytes:
    """A model file whose one weight claims something."""
    return archive({"module": {"w": Tensor("0", **{"shape": (2, 3), "numel": 6, **changes})}})


def claiming(numel: int) -> bytes:
    """A model file whose pickle claims a storage of so many elements; the archive holds six."""
    value = {"module": {"w": Tensor("0", (2, 3), numel=numel)}}
    return Zip(parts(pickled(value), {"0": bytes(24)})).write()


def pickle_of(code: bytes) -> bytes:
    """An archive around a pickle written as opcodes."""
    return Zip(parts(code, {"0": bytes(24)})).write()


def linked_out(root: Path) -> Path:
    """The tag is a link to a checkpoint elsewhere."""
    elsewhere = zero2(root.parent / "elsewhere")
    root.mkdir()
    (root / TAG).symlink_to(elsewhere / TAG)
    return write(root / "latest", TAG.encode())


def bound(path: Path) -> None:
    """A socket in place of a file."""
    home = Path.cwd()
    os.chdir(path.parent)  # socket names are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(home)


def tar() -> bytes:
    """A tar file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        made.addfile(tarfile.TarInfo("model.pt"))
    return out.getvalue()


def overlapping() -> bytes:
    """Two storages that claim the same bytes."""
    pickle, zero = parts(pickled({"module": {}}), {"0": bytes(24)})[::2]
    at = len(Zip([pickle])._member(pickle))
    return Zip([pickle, zero, Part("archive/data/1", size=24, header=at)]).write()


def lying(**lies: Any) -> bytes:
    """An archive whose directory says something else of its storage."""
    honest = parts(pickled({"w": Tensor("0", (6,))}), {"0": bytes(24)})
    return Zip(
        [replace(part, **lies) if part.name == "archive/data/0" else part for part in honest], zip64=True
    ).write()


def swapped(root: Path) -> Path:
    """A ZeRO-3 checkpoint whose optimizer is said to be in swap files; an empty directory for those of rank 0."""
    zero3(root, optim={"fp32_flat_groups": [Tensor("0", (0,)), Tensor("1", (0,))]})
    path = root / TAG / "offloaded_tensors" / "rank00"
    path.mkdir(parents=True)
    (path.parent / "rank01").mkdir()
    return path


HONEST = weights()
DIRECTORY = HONEST.index(b"PK\x01\x02")
LEGACY = legacy({"w": Tensor("0", (6,))}, [("0", 6, bytes(24))])
SAFETENSORS = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
LAUGHS = (
    b"\x80\x02](K\x01eq\x000"
    + b"".join(b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1]) + b"0" for level in range(100))
    + b"h\x64"
)
NAN = float("nan")
NOT_A_NAME = "cannot be the name of a parameter"

ROWS: dict[str, Row] = {
    # What is no archive, or not a whole one.
    "01 empty file": Row(file(b""), "found an empty file"),
    "02 truncated in the data": Row(file(HONEST[:200]), "no directory at its end; it is truncated"),
    "03 truncated in the data, legacy": Row(file(LEGACY[:-5]), "expected at least .* the file is truncated"),
    "04 truncated in the central directory": Row(file(HONEST[: DIRECTORY + 60]), "no directory at its end; it is"),
    "05 a hole in the central directory": Row(file(HONEST[:DIRECTORY] + HONEST[DIRECTORY + 60 :]), "truncated or dama"),
    "06 truncated in the pickle": Row(file(pickle_of(pickled({"module": {}})[:-4])), "the pickle ends early"),
    "07 truncated in the pickle, legacy": Row(file(LEGACY[:180]), "the pickle ends early"),
    "08 an HTML error page": Row(file(b"\n<!DOCTYPE html><html>404"), "an HTML or XML page: the download failed"),
    "09 an LFS pointer": Row(file(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "run `git lfs pull`"),
    "10 gzip": Row(file(gzip.compress(HONEST)), "a gzip file: unpack it first"),
    "11 tar": Row(file(tar()), "a tar file: unpack it first"),
    "12 safetensors": Row(file(struct.pack("<Q", len(SAFETENSORS)) + SAFETENSORS + bytes(4)), "a safetensors file"),
    "13 a directory": Row(file(Path.mkdir), "expected a regular file, found a directory"),
    "14 zeros only": Row(file(bytes(4096)), "zeros only: the file was never written"),
    "15 anything at all": Row(file(b"\xde\xad\xbe\xef" * 40), "expected a torch archive, found bytes that begin"),
    # Claims about storages and tensors.
    "16 overlapping storages": Row(file(overlapping()), "it overlaps what follows"),
    "17 a storage out of range": Row(file(lying(header=1 << 40)), "it overlaps what follows"),
    "18 zip64 claims terabytes": Row(file(lying(size=1 << 42)), "claims 4398046511104 bytes at byte"),
    "19 zip64 claims all there is": Row(file(lying(size=(1 << 64) - 1)), "claims 18446744073709551615 bytes"),
    "20 the pickle claims terabytes": Row(file(claiming(1 << 40)), "claims 4398046511104 bytes, the archive holds 24"),
    "21 negative shape": Row(file(weights(shape=(-2, -3))), "a tensor's size holds -2, which is no count"),
    "22 negative stride": Row(file(weights(stride=(-3, 1), offset=3)), "a tensor's stride holds -3, which is no count"),
    "23 huge shape": Row(file(weights(shape=(1 << 40,))), "reaches past its storage of 24 bytes"),
    "24 huge stride": Row(file(weights(stride=(1 << 40, 1))), "reaches past its storage of 24 bytes"),
    "25 huge shape of stride zero": Row(file(weights(shape=(1 << 40,), stride=(0,))), "its storage holds 24"),
    "26 offset past the storage": Row(file(weights(offset=1)), "at offset 1 reaches past its storage of 24 bytes"),
    "27 offset that wraps around": Row(file(weights(offset=(1 << 64) - 6)), "an impossible offset"),
    "28 element counts that overflow": Row(file(weights(shape=(1 << 32, 1 << 32), stride=(0, 0))), "storage holds 24"),
    "29 numel that overflows": Row(file(weights(numel=(1 << 62) + 6)), "is not one of torch's storages"),
    "30 duplicate members": Row(
        file(Zip([*parts(pickled({})), *parts(pickled({}))]).write()), "member 'archive/data.pkl' appears twice"
    ),
    "31 member names with dots": Row(
        file(Zip([*parts(pickled({})), Part("archive/../../../etc/cron.d/x")]).write()), "points outside the archive"
    ),
    # `latest` and the tag.
    "32 latest leads up": Row(latest(b"../../etc"), "expected the name of a tag, found '../../etc'"),
    "33 latest is absolute": Row(latest(b"/etc"), "expected the name of a tag, found '/etc'"),
    "34 latest is binary": Row(latest(b"\xff\xfe\x00\x01" * 9), "expected the name of a tag, found"),
    "35 latest is a gigabyte": Row(
        lambda root: (path := latest(b"global_step3")(root), os.truncate(path, 1 << 30))[0], "expected the name of a tag"
    ),
    "36 latest is a tag and a gigabyte of blanks": Row(latest(b"global_step3" + b" " * 100_000), "expected the name"),
    "37 latest is empty": Row(latest(b""), "expected the name of a tag, found ''"),
    "38 latest names nothing": Row(latest(b"global_step4"), "names tag 'global_step4', which is not there; found glob"),
    "39 latest is longer than any name": Row(latest(b"a" * 300), "which is not there"),
    "40 the tag is a link out": Row(linked_out, "leads out of .* give that directory itself if you trust it"),
    # Names.
    "41 a name with NUL": Row(named("w\0.weight"), NOT_A_NAME),
    "42 a name with a newline": Row(named("w\n.weight"), NOT_A_NAME),
    "43 a name of 64 KB": Row(named("w" * 64_000), NOT_A_NAME),
    "44 a name of 65 KB, which is skipped": Row(named("w" * 66_000), NOT_A_NAME),
    "45 a name of invalid UTF-8": Row(named(b"w\xff"), "the pickle is damaged .* invalid start byte"),
    "46 a name of surrogates": Row(named("w\ud800"), NOT_A_NAME),
    "47 the name __metadata__": Row(named("__metadata__"), NOT_A_NAME),
    "48 an empty name": Row(named(""), NOT_A_NAME),
    "49 a name that steers terminals": Row(named("\x1b[2Jw"), NOT_A_NAME),
    "50 a number for a name": Row(states(model={"module": {7: Tensor("0", (2,))}}), NOT_A_NAME),
    # Ranks.
    "51 world size 0": Row(states(OPTIM0, optim={"partition_count": 0}), "from 1 to 1000000, found 0"),
    "52 world size -1": Row(states(OPTIM0, optim={"partition_count": [-1]}), r"from 1 to 1000000, found \[-1\]"),
    "53 world size 10**9": Row(states(OPTIM0, optim={"partition_count": 10**9}), "from 1 to 1000000, found 1000000000"),
    "54 world size of 60000 bits": Row(states(OPTIM0, optim={"partition_count": 1 << 60000}), "an integer of 60001 bits"),
    "55 NaN partition_count": Row(states(OPTIM0, optim={"partition_count": [NAN]}), r"found \[nan\]"),
    "56 group counts differ": Row(
        states(OPTIM0, rank1={"single_partition_of_fp32_groups": [Tensor("0", (4,)), Tensor("0", (4,))]}),
        r"param groups differ between ranks \(rank 0: 1, rank 1: 2\)",
    ),
    "57 ranks of two runs, by version": Row(
        states(OPTIM, top1={"ds_version": "0.18.0"}), r"has ds_version 0\.18\.0, .* has 0\.19\.8; .* different runs"
    ),
    "58 ranks of two runs, by step": Row(
        states(OPTIM, rank1={"base_optimizer_state": {"state": {0: {"step": 4}}}}), "has step 4, .* has 3; .* differ"
    ),
    "59 ranks of two runs, by stage": Row(states(OPTIM, rank1={"zero_stage": 1}), "has zero_stage 1, .* has 2"),
    "60 ranks of two runs, by size": Row(
        states(OPTIM, rank1={"single_partition_of_fp32_groups": [Tensor("0", (5,))]}), "expected 4 elements or fewer, f"
    ),
    "61 ranks of two runs, ZeRO-3 by step": Row(
        lambda root: zero3(root, rank1={"optimizer_state_dict": {"state": {0: {"step": 4}}}}) / TAG / OPTIM, "has step 4"
    ),
    "62 ranks of two runs, ZeRO-3 by frozen weights": Row(
        lambda root: zero3(root, model1={"global_steps": 4}) / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt",
        "has global_steps 4, .* has 3; the files are of different runs",
    ),
    "63 one rank in two files": Row(
        lambda root: write(zero2(root) / TAG / "mp_rank_0_model_states.pt", HONEST).parent, "expected one file for each"
    ),
    # What is no file.
    "64 a FIFO": Row(file(os.mkfifo), "expected a regular file, found a FIFO"),
    "65 a device": Row(file(lambda path: path.symlink_to("/dev/zero")), "found a character device"),
    "66 a socket": Row(file(bound), "expected a regular file, found a socket"),
    "67 a link to nothing": Row(file(lambda path: path.symlink_to("nothing")), "no such file"),
    "68 a link to itself": Row(file(lambda path: path.symlink_to(path.name)), "cannot be read: Too many levels"),
    "69 FIFO for an optimizer file": Row(file(os.mkfifo, OPTIM), "expected a regular file, found a FIFO"),
    # What the dicts hold.
    "70 no dict": Row(file(archive([1, 2])), "expected a dict in the file, found list"),
    "71 no module": Row(states(model={"module": WITHOUT}), "`module` is empty"),
    "72 frozen weights of laughs": Row(states(model={"frozen_param_fragments": {"w": Raw(LAUGHS[2:])}}), "describes more than 1000000 values"),
    "73 a shape of 65536 dimensions": Row(states(model={"param_shapes": [{"w": (1 << 40,) * 65_536}]}), "is no shape but"),
    "74 a shape that overflows": Row(states(model={"param_shapes": [{"w": (1 << 40, 1 << 40)}]}), "is no shape but"),
    "75 a negative shape": Row(states(model={"param_shapes": [{"w": (-2, -3), "b": (2,)}]}), "is no shape but"),
    "76 a shape of laughs": Row(states(model={"param_shapes": [{"w": (Raw(LAUGHS[2:]),)}]}), "describes more than 1000000 values"),
    "77 a parameter in two groups": Row(states(model={"param_shapes": [{"w": (2, 3)}] * 2}, optim={
        "single_partition_of_fp32_groups": [Tensor("0", (3,)), Tensor("1", (3,))], "group_paddings": [0, 0],
        "partition_count": [2, 2]}), "parameter 'w' is in two groups"),
    "78 padding of 60000 bits": Row(
        states("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", optim={"group_paddings": [(1 << 62)]},
               model={"param_shapes": [{"w": (2, 2), "b": (2,)}]}), "expected 6 elements of parameters and"
    ),
    "79 flats that are no list": Row(
        states(OPTIM0, optim={"single_partition_of_fp32_groups": Raw(LAUGHS[2:])}), "describes more than 1000000 values"
    ),
    "80 flats of two dimensions": Row(
        states(OPTIM0, optim={"single_partition_of_fp32_groups": [Tensor("0", (2, 2))]}), "expected 1-D tensors in"
    ),
    "81 a parameter too many": Row(
        states(OPTIM0, model={"param_shapes": [{"w": (2, 3), "b": (2,), "c": (9,)}]}), "expected 17 elements of par"
    ),
    "82 another shape in the module": Row(
        states(model={"module": {"w": Tensor("0", (3, 2), kind="BFloat16Storage")}}), r"has shape \[2, 3\] in `param_sh"
    ),
    "83 an alias that is no name": Row(states(model={"shared_params": {"w\ud800": "w"}}), NOT_A_NAME),
    "84 an alias of no name": Row(states(model={"shared_params": {"alias": "w\n"}}), NOT_A_NAME),
    "85 a swap directory that is none": Row(
        lambda root: (path := swapped(root), path.rmdir(), write(path, b""))[0], "cannot be listed: Not a directory"
    ),
    "86 a universal checkpoint of no rank": Row(
        real("l_a_z3_bf16_w2_universal", "zero/optimizer_state.pt", {"partition_count": -2}), "expected a stage from 1 to 3"
    ),
    "87 experts without a model": Row(
        lambda root: only(root, "h_z2_moe_ep2_w4", "expert"), "no mp_rank_00_model_states.pt; it holds the names"
    ),
}  # fmt: skip
