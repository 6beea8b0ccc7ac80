"""Found first on PYTHONPATH by every Python process under `sdpa-repro capture -- ...`; starts the recorder there.

It takes its folder off `sys.path` again, and hands over to the environment's own `sitecustomize` if there is
one. Nothing that goes wrong here may change the script: the recorder then stays off and says so at the end.
"""

import json
import os
import sys


def _folder() -> str:
    return os.path.dirname(os.path.abspath(__file__))


def _record() -> None:
    """Load the package from where it lies, which need not be on `sys.path`, and arm it."""
    plan = json.loads(os.environ["SDPA_REPRO_CAPTURE"])
    parent = os.path.dirname(plan["package"])
    sys.path.insert(0, parent)
    try:
        from sdpa_repro.capturing import child
    finally:
        sys.path.remove(parent)
    child.install(plan)


def _say_so(error: Exception) -> None:
    """Leave a note for the report."""
    try:
        plan = json.loads(os.environ["SDPA_REPRO_CAPTURE"])
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
if "SDPA_REPRO_CAPTURE" in os.environ:
    try:
        _record()
    except Exception as error:
        _say_so(error)
_hand_over()
