"""Runs a module of rlx about environments in any Python: `PYTHON rlx/envs/boot.py worker NAME SOCKET BEATS STACKS`, or `… probe`.

It takes rlx from the folder where this file lies, and everything else from that Python: the packages of the two never meet.
The syntax is that of old Pythons, so that they can say that they are too old.
"""

import importlib
import importlib.util
import os
import sys

NEEDED = ("aiohttp", "jinja2", "msgspec", "numpy", "tokenizers")  # and verifiers, for its environments (`rlx.envs.load`)


def environment(another):  # type: (bool) -> dict[str, str]
    """The environment of a process that runs this file. `another`: in another Python than this one."""
    left = {"PYTHONHOME", "VIRTUAL_ENV"} if another else set()
    left.add("PYTHONDONTWRITEBYTECODE")  # it would compile verifiers at each start, which takes twice as long as all the rest
    return {name: value for name, value in os.environ.items() if name not in left}


class Shipped:
    """Finds the environments that rlx ships, whose code is where rlx's own is."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: (str, object, object) -> object
        """See `importlib.abc.MetaPathFinder`."""
        folder = importlib.import_module("rlx.config.pythons").shipped(name) if path is None and name.startswith("rlx_") else None
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


def main():  # type: () -> None
    """Make `rlx` importable and call `main` of `rlx.envs.worker` or `rlx.envs.probe`. Exits with a sentence if this Python cannot."""
    if sys.version_info < (3, 11):  # noqa: UP036  (any Python may run this file)
        sys.exit("%s is Python %s; rlx needs 3.11 or newer" % (sys.executable, sys.version.split()[0]))  # noqa: UP031
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        sys.exit(f"{sys.executable} has no {', '.join(lacking)}; install with: {sys.executable} -m pip install {' '.join(lacking)}")
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("rlx", os.path.join(package, "__init__.py"), submodule_search_locations=[package])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["rlx"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.meta_path.append(Shipped)  # type: ignore[arg-type]
    importlib.import_module("rlx.envs." + sys.argv[1]).main(*sys.argv[2:])


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as with `python -m`: this file's folder has modules with common names
    elif os.getcwd() not in sys.path:  # PYTHONSAFEPATH: what is first is not this file's folder, but the first of PYTHONPATH
        sys.path.append(os.getcwd())
    main()
