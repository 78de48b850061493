"""Fixtures and settings for every room's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For a first look at a failure, and for hours on end: pytest --hypothesis-profile=...
settings.register_profile("unshrunk", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("soak", settings.get_profile("default"), max_examples=20_000)
settings.load_profile("default")


@pytest.fixture(scope="module")
def without_fsync() -> Iterator[None]:
    """Leaves out the waiting for the disk, where many conversions are made and durability is not the question."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
