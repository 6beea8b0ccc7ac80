"""Turn a failing model prefill into a model-free PyTorch bug report about scaled_dot_product_attention.

The verbs of the command line as functions; torch is imported when the first one is used:

    with sdpa_repro.capture("dumps/") as session:
        model(**inputs)
    result = sdpa_repro.replay(session.dumps[0])
    print(result.sentence)
"""

from __future__ import annotations

from importlib import import_module

from sdpa_repro.version import VERSION

TYPE_CHECKING = False  # not of `typing`, whose import would delay the program's first moment (see `__main__`)
if TYPE_CHECKING:
    from typing import Any

    from sdpa_repro.attention import AttentionCall
    from sdpa_repro.capturing.session import capture
    from sdpa_repro.dump import Dump, load
    from sdpa_repro.errors import InputError
    from sdpa_repro.explaining.explain import explain
    from sdpa_repro.guarding.guard import guard
    from sdpa_repro.locating.locate import locate
    from sdpa_repro.reducing.dump_reducer import reduce_dump as reduce
    from sdpa_repro.replaying.replay import replay

__version__ = VERSION

_HOME = {
    "AttentionCall": "sdpa_repro.attention",
    "Dump": "sdpa_repro.dump",
    "InputError": "sdpa_repro.errors",
    "capture": "sdpa_repro.capturing.session",
    "explain": "sdpa_repro.explaining.explain",
    "guard": "sdpa_repro.guarding.guard",
    "load": "sdpa_repro.dump",
    "locate": "sdpa_repro.locating.locate",
    "reduce": "sdpa_repro.reducing.dump_reducer",
    "replay": "sdpa_repro.replaying.replay",
}

_NAMES = {"reduce": "reduce_dump"}

__all__ = [
    "AttentionCall",
    "Dump",
    "InputError",
    "__version__",
    "capture",
    "explain",
    "guard",
    "load",
    "locate",
    "reduce",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), _NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
