"""Draws any checkpoint DeepSpeed could have written whose outcome is certain."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from tests.generator.spec import Buffer, Kind, Param, Spec

NAMES = st.one_of(
    st.sampled_from(
        ["w", "weight", "layers.0.weight", "layers.10.weight", "a b", "0", 'quo"te', "back\\slash", "ünïcödé.权重"]
    ),
    st.text(st.characters(categories=["L", "N", "P", "S"], max_codepoint=0x2FFF), min_size=1, max_size=24),
).filter(lambda name: name.isprintable() and not name.endswith("_extra_state") and name != "__metadata__")

SHAPES = st.one_of(
    st.sampled_from([(), (1,), (0,), (0, 5), (5, 0), (1, 1), (7,), (17, 3), (33,), (3, 4, 5)]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.integers(1, 700).map(lambda count: (count,)),
)

_BUFFER_DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any checkpoint whose outcome is certain."""
    stage = draw(st.sampled_from([0, 1, 1, 2, 2, 3, 3, 3]))
    release = draw(st.sampled_from([3, 3, 3, 2, 1, 0])) if stage else 3
    bf16_optimizer = stage == 1 and release >= 2 and draw(st.booleans())
    precision = "bf16" if bf16_optimizer else draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    master = draw(st.sampled_from(["fp32", "fp32", precision])) if not bf16_optimizer else "fp32"
    groups = draw(st.integers(1, 3))
    names = iter(draw(st.lists(NAMES, min_size=20, max_size=20, unique=True)))
    exclude = release >= 2 and stage > 0 and draw(st.booleans())
    params = []
    for number in range(draw(st.integers(1, 7))):
        shape = (5, 3) if number == 0 else draw(SHAPES)
        kind: Kind = "trained" if number == 0 else draw(st.sampled_from(["trained", "trained", "frozen", "left out"]))
        if exclude and not math.prod(shape):
            kind = "trained" if release < 3 else "left out"
        # Two names of nothing are not told from two nothings.
        count = draw(st.sampled_from([0, 0, 1, 2])) if math.prod(shape) else 0
        aliases = tuple(next(names) for _ in range(min(count, 2)))
        group = draw(st.integers(0, groups - 1)) if number else 0
        params.append(Param(next(names), shape, kind, group, aliases, draw(st.integers(0, 2))))
        if number >= 4:
            break
    buffers = []
    for _ in range(draw(st.integers(0, 2))):
        form = draw(st.sampled_from(["whole", "transposed", "inside", "stepped"]))
        shape = draw(st.sampled_from([(), (1,), (0,), (5,), (3, 4), (2, 3, 2)]))
        aliases = (next(names),) if math.prod(shape) and draw(st.booleans()) else ()
        buffers.append(Buffer(next(names), shape, draw(st.sampled_from(_BUFFER_DTYPES)), form, aliases))
    return Spec(
        stage=stage,
        world=draw(st.integers(1, 9)),
        precision=precision,
        params=tuple(params),
        buffers=tuple(buffers),
        release=release,
        bf16_optimizer=bf16_optimizer,
        master=master,
        groups=groups,
        sub_group=draw(st.sampled_from([1, 10, 100, 1 << 30])),
        aligned=draw(st.booleans()),
        exclude_frozen=exclude,
        legacy=draw(st.booleans()),
        archive_root=draw(st.booleans()),
        shape_as=draw(st.sampled_from(["Size", "list", "tuple"])),
        shared=draw(st.sampled_from(["right", "from first name", "chain", "empty", "absent"])),
        adam=draw(st.booleans()),
        client=draw(st.booleans()),
        extra_state=draw(st.booleans()),
        mics=draw(st.sampled_from([1, 1, 4])),
        flat_masters=draw(st.booleans()),
        rebuilt_from_type=draw(st.booleans()),
        count_as_list=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 32)),
    )
