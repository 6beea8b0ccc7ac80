"""Found first on PYTHONPATH by every Python process under `sdpa-repro capture -- ...`; starts the recorder there.

Under `sdpa-repro guard -- ...` it starts the guard, in the same way.

It takes its folder off `sys.path` again, and hands over to the environment's own `sitecustomize` if there is
one. Nothing that goes wrong here may change the script: the recorder then stays off and says so at the end.
"""

import importlib
import json
import os
import sys

CHILDREN = {"SDPA_REPRO_CAPTURE": "sdpa_repro.capturing.child", "SDPA_REPRO_GUARD": "sdpa_repro.guarding.child"}
"""Variable with the plan, and the module whose `install` takes it."""


def _folder() -> str:
    return os.path.dirname(os.path.abspath(__file__))


def _install(variable: str) -> None:
    """Load the package from where it lies, which need not be on `sys.path`, and arm it."""
    plan = json.loads(os.environ[variable])
    parent = os.path.dirname(plan["package"])
    sys.path.insert(0, parent)
    try:
        child = importlib.import_module(CHILDREN[variable])
    finally:
        sys.path.remove(parent)
    child.install(plan)


def _say_so(variable: str, error: Exception) -> None:
    """Leave a note for the report."""
    try:
        plan = json.loads(os.environ[variable])
        with open(os.path.join(plan["reports"], f"{os.getpid()}-failed.json"), "w") as file:
            json.dump({"pid": os.getpid(), "state": "failed", "error": repr(error)[:300]}, file)
    except Exception:
        return


def _hand_over() -> None:
    """Import the next `sitecustomize` on the path in place of this one."""
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _folder()]
for _variable in CHILDREN:
    if _variable in os.environ:
        try:
            _install(_variable)
        except Exception as error:
            _say_so(_variable, error)
_hand_over()
