"""Checkpoints nobody thought of, compared with what was put into them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lazyzero
from lazyzero.verify import verify
from tests import oracle, strategies
from tests.generator.spec import Spec
from tests.generator.stages import write

pytestmark = pytest.mark.usefixtures("without_fsync")


@given(
    spec=strategies.specs(),
    dtype=st.sampled_from(list(oracle.DTYPES)),
    format=st.sampled_from(["safetensors", "bin"]),
    shard=st.sampled_from([None, 1, 64, 300, 5000]),
)
def test_any_checkpoint_comes_out_as_it_was_put_in(spec: Spec, dtype: str, format: str, shard: int | None) -> None:
    """Every stage, world, grouping, tie, padding, dtype, release and container: names, bits, ties, missing names."""
    with tempfile.TemporaryDirectory() as work:
        truth = write(spec, Path(work) / "checkpoint")
        output = Path(work) / "out"
        report = lazyzero.convert(truth.root, output, dtype=dtype, format=format, max_shard_size=shard)
        wrong = oracle.faults(truth.want, truth.tied, output, format=format, dtype=oracle.DTYPES[dtype])
        assert wrong == []
        assert truth.missing <= set(report.missing) <= truth.missing | truth.mentioned
        assert report.layout == truth.layout
        assert verify(truth.root, output, dtype=dtype).differences == ()


@given(spec=strategies.specs())
def test_a_tensor_read_alone_has_the_same_values(spec: Spec) -> None:
    """shape, dtype, nbytes, numpy(), torch(), rows and ties of each entry, without any conversion."""
    with tempfile.TemporaryDirectory() as work:
        truth = write(spec, Path(work) / "checkpoint")
        with lazyzero.open_checkpoint(truth.root) as checkpoint:
            assert set(checkpoint) == set(truth.want)
            assert checkpoint.world_size == truth.world
            for name, want in truth.want.items():
                tensor = checkpoint[name]
                assert (tensor.shape, tensor.nbytes) == (tuple(want.shape), want.nbytes)
                assert f"torch.{tensor.dtype}" == str(want.dtype)
                assert oracle.same_bits(want, tensor.torch())
                assert tensor.numpy().tobytes() == oracle.raw(want)
                if want.ndim and want.shape[0] > 1:
                    assert tensor[1:].tobytes() == oracle.raw(want[1:])
                    assert tensor[-1].tobytes() == oracle.raw(want[-1])
            groups: dict[str, set[str]] = {}
            for name in truth.want:
                groups.setdefault(truth.tied.get(name, name), set()).add(name)
            found: dict[str, set[str]] = {}
            for name, tensor in checkpoint.items():
                found.setdefault(tensor.tied_to or name, set()).add(name)
            assert sorted(map(sorted, found.values())) == sorted(map(sorted, groups.values()))
