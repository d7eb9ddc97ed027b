"""Opens and reads what stdin names, a path per line, and prints one line of JSON for each: what happened, detail, seconds."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

import h5py  # noqa: F401  before the limits

import convert
import convert.checkpoints.formats.keras
import convert.checkpoints.orbax.reader
from convert.checkpoints import known_formats

ALLOWED: list[str] = []  # the folder of the case
_WATCHED = {
    "open": (0,),
    "os.listdir": (0,),
    "os.scandir": (0,),
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
}


def _hook(event: str, args: tuple[object, ...]) -> None:
    """Any file that Python opens, lists or writes while a case runs must be the checkpoint's own."""
    if not ALLOWED:
        return
    if event in ("os.system", "subprocess.Popen", "socket.connect", "pickle.find_class"):
        raise AssertionError(f"{event} {args!r:.200}")
    for index in _WATCHED.get(event, ()):
        name = args[index]
        if isinstance(name, str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(name))
            mode = args[1] if event == "open" and len(args) > 1 else "r"
            wrong = not path.startswith(ALLOWED[0]) and not path.startswith((sys.prefix, sys.base_prefix, *_CODE))
            if wrong or (isinstance(mode, str) and set(mode) & set("wxa+")):
                raise AssertionError(f"{event} {name!r:.200} {mode!r}")


_CODE = [str(Path(convert.__file__).parents[2])]
if sys.pycache_prefix is not None:  # where compiled bytecode lies, if not beside the code
    _CODE.append(os.path.realpath(sys.pycache_prefix))


def run(kind: str, path: str) -> tuple[str, str]:
    """("read" | "refused" | "failure", detail)."""
    try:
        if kind == "rules":
            convert.load_rules(path)
            return "read", ""
        source = convert.open_source(path, leaf_names=[["a", "b", "c"]])
        for name, leaf in source.leaves.items():
            array = source.read(name)
            assert array.shape == leaf.spec.shape and array.nbytes == leaf.spec.nbytes, name
    except convert.ConvertError as error:
        return "refused", str(error)[:80]
    except BaseException:  # noqa: BLE001 - anything else is what is looked for
        ALLOWED.clear()  # or the traceback could not read the source
        return "failure", traceback.format_exc()[-1500:]
    return "read", ""


def main(kind: str, memory: str) -> None:
    list(known_formats())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + int(memory), used + int(memory)))
    sys.addaudithook(_hook)
    for path in sys.stdin.read().splitlines():
        case = next(parent for parent in Path(path).parents if parent.parent.name == "case")
        ALLOWED[:] = [os.path.realpath(case)]
        start = time.monotonic()
        result, detail = run(kind, path)
        ALLOWED.clear()
        print(json.dumps([result, detail, time.monotonic() - start]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
