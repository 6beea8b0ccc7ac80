"""What went wrong while a model was loaded, in one line that says what to do.

transformers and huggingface_hub wrap failures in each other and change their classes between releases,
so a failure is recognised by class names along the chain of causes, HTTP status and a few phrases.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from sdpa_repro.errors import InputError

OFFLINE = {
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "TimeoutException",
    "Timeout",
    "ProxyError",
    "SSLError",
    "gaierror",
    "NetworkError",
}
PACKAGES = {
    "torchvision": "torchvision: install the release made for this torch",
    "pillow": "pillow: pip install pillow",
    "pil": "pillow: pip install pillow",
    "sentencepiece": "sentencepiece: pip install sentencepiece",
    "tiktoken": "tiktoken: pip install tiktoken",
    "accelerate": "accelerate: pip install accelerate",
}
"""What to install when a module is missing, by a word of transformers' message."""

MEMORY_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, or its class name."""
    lines = (" ".join(line.split()) for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def missing_package(error: BaseException) -> str | None:
    """The package an error asks for and how to install it; None when nothing is missing."""
    missing = [
        link
        for link in causes(error)
        if isinstance(link, ImportError) or "missing optional dependencies" in str(link).lower()
    ]
    for link in reversed(missing):
        for module, hint in PACKAGES.items():
            if module in f"{getattr(link, 'name', '')} {link}".lower():
                return hint
    return f"a package that is not installed ({first_line(missing[-1])})" if missing else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the CPU or a GPU ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in MEMORY_PHRASES)


def out_of_memory(device: object) -> InputError:
    """The line for a model or a prefill that does not fit."""
    return InputError(
        f"out of memory on {device}: use a smaller --layers (with --random-weights), --dtype bfloat16, "
        "a shorter prompt, or --device cpu"
    )


def explained(error: BaseException, name: str, version: str, *, revision: str | None = None) -> InputError:
    """The one line for an error raised while the configuration, processor or weights of `name` were loaded.

    version: that of the installed transformers, for architectures it does not know.
    """
    chain = list(causes(error))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    text = " ".join(str(link) for link in chain)
    return InputError(
        _from_the_hub(names, _status(chain), text, name, revision)
        or _from_the_files(chain, names, text, name, version)
        or f"{name} could not be loaded: {type(error).__name__}: {first_line(error)}"
    )


def _status(chain: list[BaseException]) -> int | None:
    """The HTTP status of the first link that carries a response."""
    for link in chain:
        status = getattr(getattr(link, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _from_the_hub(names: set[str], status: int | None, text: str, name: str, revision: str | None) -> str | None:
    page = f"https://huggingface.co/{name}"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if "GatedRepoError" in names:
        return f"{name} is gated: accept its terms at {page}, then {log_in}"
    if "RevisionNotFoundError" in names:
        return f"{name} has no revision {revision}: see {page} for its branches and tags"
    if "RepositoryNotFoundError" in names or (status == 404 and "EntryNotFoundError" not in names):
        return f"there is no model {name} on the hub, or it is private: check the spelling, or {log_in}"
    if status in (401, 403):
        return f"the hub refused {name} (HTTP {status}): {log_in}, and ask for access at {page}"
    if names & OFFLINE or "couldn't connect" in text.lower():
        return (
            f"{name} is not in the local cache and the hub cannot be reached: connect (and unset HF_HUB_OFFLINE), "
            "or give --model the path of a downloaded folder"
        )
    if "HFValidationError" in names:
        return f"{name} is neither a folder nor a model id such as google/gemma-4-12B-it"
    if "EntryNotFoundError" in names:
        return f"{name} lacks a file that transformers needs: {text.splitlines()[0]}"
    if status is not None:
        return f"the hub answered HTTP {status} for {name}: try again later, or give --model a downloaded folder"
    return None


def _from_the_files(chain: list[BaseException], names: set[str], text: str, name: str, version: str) -> str | None:
    lowered = text.lower()
    if any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in chain):
        return f"the disk is full while loading {name}: free space, or set HF_HOME to another disk"
    if "scaled_dot_product_attention yet" in text:
        return f"{name} does not run through scaled_dot_product_attention in transformers {version}: nothing to capture"
    if "unrecognized model in" in lowered:
        return f"the config.json of {name} is missing or has no model_type: give a model saved by transformers"
    if "does not recognize this architecture" in lowered:
        return (
            f"transformers {version} does not know the architecture of {name}: "
            "pip install --upgrade transformers, or check model_type in its config.json"
        )
    if "trust_remote_code" in text:
        return f"{name} runs its own Python code: read it, then add --trust-remote-code if you trust it"
    if "JSONDecodeError" in names or "not a valid json" in lowered:
        return f"a JSON file of {name} is broken: download it again ({first_line(chain[0])})"
    if any("StrictDataclass" in found for found in names):
        return f"the configuration of {name} is not valid for transformers {version}: {first_line(chain[-1])}"
    if "no file named" in lowered:
        return f"{name} has no weights: add --random-weights to build it from its configuration alone"
    package = missing_package(chain[0])
    return f"{name} needs {package}" if package else None
