"""Source files: found once, read at explicit offsets, never more of them open than the system gives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lazyzero.container.source import DescriptorPool, Source
from lazyzero.errors import BrokenArchive, CheckpointNotFound, ReadError, SourceChanged
from tests.forge import Tensor, archive, write


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A file of 1000 bytes."""
    return Source.open(write(tmp_path / "a.bin", bytes(range(250)) * 4))


def test_reads_at_any_offset(source: Source) -> None:
    """Reads give exactly what was asked for, into several places if need be."""
    assert source.read(0, 3) == b"\0\1\2"
    assert source.read(249, 2) == b"\xf9\0"
    assert source.read(1000, 0) == b""
    first, second = bytearray(2), bytearray(3)
    source.read_into([memoryview(first), memoryview(second)], 5)
    assert (first, second) == (b"\5\6", b"\7\x08\x09")


def test_thousands_of_places_in_one_read(source: Source) -> None:
    """More places than one system call takes are filled all the same."""
    places = [bytearray(1) for _ in range(1000)]
    source.read_into([memoryview(place) for place in places], 0)
    assert b"".join(places) == bytes(range(250)) * 4


def test_short_reads(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives less than was asked for is asked again."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    first, second = bytearray(10), bytearray(20)
    source.read_into([memoryview(first), memoryview(second)], 3)
    assert first + second == bytes(range(3, 33))


def test_errors_of_the_system(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO is a ReadError that names file and offset."""

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ReadError, match=r"a\.bin: reading at byte 17 failed: Input/output error"):
        source.read(17, 4)


def test_a_file_that_shrinks(source: Source) -> None:
    """Reading behind the end of a file that was longer says that it changed."""
    source.read(0, 1)  # now it is open
    os.truncate(source.path, 100)
    with pytest.raises(SourceChanged, match="truncated meanwhile"):
        source.read(90, 20)
    with pytest.raises(SourceChanged, match="changed while being read"):
        source.check()


def test_a_file_that_is_replaced_or_vanishes(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file under the same name is noticed when it is opened; so is none."""
    monkeypatch.setattr("lazyzero.container.source.POOL", DescriptorPool(4))
    write(Path(source.path + ".new"), bytes(1000))
    Path(source.path + ".new").replace(source.path)
    with pytest.raises(SourceChanged, match="changed while being read"):
        source.read(0, 1)
    Path(source.path).unlink()
    with pytest.raises(SourceChanged, match="vanished"):
        source.read(0, 1)
    with pytest.raises(SourceChanged, match="vanished"):
        source.check()
    os.mkfifo(source.path)
    with pytest.raises(SourceChanged, match="changed while being read"):
        source.read(0, 1)


def test_what_is_no_file(tmp_path: Path) -> None:
    """Directories, FIFOs, sockets and devices are named as such, and never opened."""
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        home = Path.cwd()
        os.chdir(tmp_path)  # socket names are short
        try:
            server.bind("sock")
        finally:
            os.chdir(home)
        for path, kind in (
            (tmp_path, "a directory"),
            (tmp_path / "fifo", "a FIFO"),
            (tmp_path / "sock", "a socket"),
            (Path("/dev/zero"), "a character device"),
        ):
            with pytest.raises(BrokenArchive, match=f"expected a regular file, found {kind}"):
                Source.open(path)
    (tmp_path / "loop").symlink_to("loop")
    for path, kind in ((tmp_path / "none", CheckpointNotFound), (tmp_path / "loop", ReadError)):
        with pytest.raises(kind):
            Source.open(path)


def test_pool_keeps_few_files_open(tmp_path: Path) -> None:
    """The pool closes the files that were not read for longest, and never one in use."""
    pool = DescriptorPool(4)
    sources = [Source.open(write(tmp_path / f"{i}", b"%d" % i)) for i in range(20)]
    with pool.lease(sources[0]) as kept:
        for source in sources[1:]:
            with pool.lease(source) as fd:
                assert os.pread(fd, 9, 0) == Path(source.path).read_bytes()
        assert os.pread(kept, 9, 0) == b"0"
        assert len(pool._open) == 4
    pool.close()
    assert not pool._open


def test_what_was_read_is_dropped_from_the_page_cache(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small reads in a row are dropped together, large ones at once, each byte once, and none that was not read."""
    dropped = list[tuple[int, int]]()
    monkeypatch.setattr("lazyzero.container.source.advise", lambda fd, at, nbytes, how: dropped.append((at, nbytes)))
    pool = DescriptorPool()
    lease = pool.lease(source)
    with lease:
        for start in range(0, 1 << 17, 1 << 12):
            lease.forget(start, start + (1 << 12))
        assert dropped == [(0, 1 << 16), (1 << 16, 1 << 16)]
        lease.forget(1 << 17, (1 << 17) + 10)
        lease.forget(5 << 20, 6 << 20)  # elsewhere
        assert dropped[2:] == [(1 << 17, 10), (5 << 20, 1 << 20)]
        lease.forget(6 << 20, (6 << 20) + 7)
        assert len(dropped) == 4
    pool.close()
    assert dropped[4:] == [(6 << 20, 7)]


def test_thousands_of_files_with_few_descriptors(tmp_path: Path) -> None:
    """Two thousand partition files are opened and read under RLIMIT_NOFILE 256."""
    data = archive({"flat": Tensor("0", (2,))})
    for rank in range(2000):
        write(tmp_path / f"{rank}.pt", data)
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from lazyzero.container.archive import open_archive\n"
        "from lazyzero.tensor import Chain\n"
        "from lazyzero.container.reader import Want, read_all\n"
        "refs = [open_archive(f'{sys.argv[1]}/{rank}.pt').root['flat'] for rank in range(2000)]\n"
        "chain, into = Chain(refs, refs[0].dtype), bytearray(16000)\n"
        "at, wants = 0, []\n"
        "for piece in chain.pieces(0, chain.total):\n"
        "    wants.append(Want(piece.storage, piece.start, 4 * piece.numel, memoryview(into)[at:at + 4 * piece.numel]))\n"
        "    at += 4 * piece.numel\n"
        "print(read_all(wants), at)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == "2000 16000\n", done.stderr
