"""What the package promises to the outside: its names, its types, its errors."""

from __future__ import annotations

import inspect
import pickle
import re
import types
import typing

import pytest

import lazyzero
from lazyzero import errors
from tests.oracle import DATA

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def test_all_is_exactly_the_public_names() -> None:
    """`from lazyzero import *` gives what is documented, and nothing public is left out."""
    public = {
        name
        for name, value in vars(lazyzero).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(lazyzero.__all__) == public
    assert list(lazyzero.__all__) == sorted(lazyzero.__all__)


def test_every_public_name_is_documented() -> None:
    """A docstring each, and one for each public method and property defined here."""
    for name in lazyzero.__all__:
        value = getattr(lazyzero, name)
        assert inspect.getdoc(value), name
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{name}.{key}"


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_pickle(kind: type[Exception]) -> None:
    """With class, text and arguments, through every protocol: they cross process borders."""
    error = kind("model.pt: expected this, found that")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert str(copy) == str(error)
        assert copy.args == error.args


def test_errors_are_one_tree_and_the_docstring_draws_it() -> None:
    """Catching LazyZeroError is enough; every class is drawn below its parent, with its builtin cousin."""
    drawn = re.findall(r"^ {4}([│ ]*)(?:[├└]── )?([A-Z]\w+)(?: \((\w+)\))?", errors.__doc__ or "", re.MULTILINE)
    names = [name for _, name, _ in drawn]
    assert sorted(names) == sorted(kind.__name__ for kind in CLASSES)
    for kind in CLASSES:
        assert issubclass(kind, errors.LazyZeroError)
        assert kind.__doc__
        assert kind.__doc__.startswith(("Raised", "Base of all"))
    for indent, name, builtin in drawn:
        kind = getattr(errors, name)
        if builtin:
            assert builtin in [base.__name__ for base in kind.__bases__]
        depth = len(kind.__mro__[: kind.__mro__.index(errors.LazyZeroError)])
        assert (len(indent) > 0) == (depth > 1), name


def test_errors_are_what_python_programmers_catch() -> None:
    """A missing checkpoint is a FileNotFoundError, a bad argument a ValueError, a full disk an OSError, and so on."""
    assert issubclass(errors.CheckpointNotFound, FileNotFoundError)
    assert issubclass(errors.InvalidRequest, ValueError)
    assert issubclass(errors.NotEnoughSpace, OSError)
    assert issubclass(errors.OutputRefused, FileExistsError)
    assert issubclass(errors.MissingDependency, ImportError)


def test_the_package_is_typed() -> None:
    """py.typed is there, and the hints of the main functions resolve."""
    import importlib.resources

    assert (importlib.resources.files("lazyzero") / "py.typed").is_file()
    hints = typing.get_type_hints(lazyzero.convert)
    assert hints["return"] is lazyzero.Report


def test_words_about_opening_are_for_what_is_not_open_yet() -> None:
    """An open checkpoint is what it is; asking to open it otherwise is refused, not passed over."""
    with lazyzero.open_checkpoint(DATA / "a_z2_bf16_w2" / "checkpoint") as checkpoint:
        for call in (lazyzero.convert, lazyzero.verify):
            with pytest.raises(errors.InvalidRequest, match="tag: the checkpoint is open already"):
                call(checkpoint, "nowhere", tag="x")
