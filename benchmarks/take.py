"""The consumer of streamed shards: notes a few values of every tensor in the shard, then deletes it.

Run by `lazyzero convert --on-shard`; stands for an upload. Nothing is imported but what is built in, so that it takes no time.

usage: take.py NOTES   (with LAZYZERO_PATH in the environment)
"""

import json
import os
import sys

_COUNT = 16  # elements in one place
_SIZES = {"F32": 4, "BF16": 2, "F16": 2}


def take(path: str, notes: str) -> None:
    """Appends a JSON line to `notes` for each tensor of the safetensors file at `path`, then deletes the file."""
    with open(path, "rb") as file, open(notes, "a") as out:  # noqa: PTH123
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            itemsize = _SIZES[entry["dtype"]]
            begin, end = entry["data_offsets"]
            numel = (end - begin) // itemsize
            count = min(_COUNT, numel)
            places = []
            for first in sorted({0, (numel - count) // 2, numel - count}):
                file.seek(8 + size + begin + first * itemsize)
                places.append([first, file.read(count * itemsize).hex()])
            row = {"name": name, "dtype": entry["dtype"], "shape": entry["shape"], "places": places}
            out.write(json.dumps(row) + "\n")
    os.unlink(path)


if __name__ == "__main__" and os.environ["LAZYZERO_PATH"].endswith(".safetensors"):  # and not the index
    take(os.environ["LAZYZERO_PATH"], sys.argv[1])
