"""What is kept of a capture in words and numbers: one record a call, the options, the reasons for seeing nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError

PHASES = ("prefill", "decode", "all")
KEEP = ("diverging", "worst", "all")
WRONG = ("diverges", "nonfinite")
MAX_DUMPS = 8
UNCOMPILED = "run again with TORCH_COMPILE_DISABLE=1, or compile with backend='eager'"


@dataclass(frozen=True)
class Options:
    """Which calls a session looks at, and which of them it dumps.

    call: only this index (0 for the first call of the session), and dump it whatever comes of it. module: a
    part of the module path, or a pattern with `*`. phase: "prefill", "decode" or "all"; a call of unknown
    phase always counts. keep: "diverging" (when none does, the single worst), "worst" or "all". max_dumps:
    None is 8, and no limit for keep="all". max_bytes: for all dumps of the session together. Wrong calls take the place
    of less severe ones. check: judge every call live; without it the first `max_dumps` calls are dumped.
    """

    call: int | None = None
    module: str | None = None
    phase: str = "all"
    keep: str = "diverging"
    stop_at_first: bool = False
    max_dumps: int | None = None
    max_bytes: int = 2 << 30
    check: bool = True

    def __post_init__(self) -> None:
        """Raises InputError for a value that does not exist."""
        if self.phase not in PHASES:
            raise InputError(f"phase {self.phase!r}: use one of {', '.join(PHASES)}")
        if self.keep not in KEEP:
            raise InputError(f"keep {self.keep!r}: use one of {', '.join(KEEP)}")
        if (self.max_dumps is not None and self.max_dumps < 1) or self.max_bytes < 1:
            raise InputError("max_dumps and max_bytes must be at least 1")

    @property
    def everything(self) -> bool:
        """Whether calls are dumped as they come, whatever the live check says."""
        return self.keep == "all" or self.call is not None or not self.check

    @property
    def slots(self) -> float:
        """The largest number of dumps."""
        if self.keep == "worst" and not self.everything:
            return 1
        if self.max_dumps is None:
            return math.inf if self.keep == "all" else MAX_DUMPS
        return self.max_dumps

    def wants(self, index: int, module: str, phase: str) -> bool:
        """Whether a call belongs to what the user asked for."""
        if self.call is not None and index != self.call:
            return False
        if self.module is not None and self.module not in module and not fnmatchcase(module, self.module):
            return False
        return self.phase in ("all", phase) or phase == "unknown"


@dataclass(frozen=True)
class CallRecord:
    """One call that a session looked at.

    status: "agrees", "diverges", "nonfinite", "unchecked" (see `reason`) or "raised". Strides in elements;
    the head stride is that of dimension -3, None for tensors without it. rank, world: which process of how many, in a
    distributed run. `kept` is the dump's file name.
    """

    index: int
    module: str
    phase: str
    thread: str
    dtype: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: str
    key_head_stride: int | None
    value_head_stride: int | None
    kernel: str
    status: str
    max_abs: float = 0.0
    threshold: float = 0.0
    ratio: float = math.nan
    rows: tuple[tuple[int, int, int], ...] = ()
    wrong_rows: int = 0
    reason: str = ""
    total_length: int | None = None
    padding: Any = None
    rank: int | None = None
    world: int | None = None
    kept: str | None = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        return self.status in WRONG

    @property
    def severity(self) -> tuple[int, float]:
        """Orders calls: wrong ones by error over threshold, then calls that raised, healthy ones, unchecked ones."""
        if self.wrong:
            return 3, math.inf if math.isnan(self.ratio) else self.ratio
        if self.status == "raised":
            return 2, 0.0
        return (0, 0.0) if self.status == "unchecked" else (1, self.ratio)

    def sentence(self) -> str:
        """What is wrong with the call, in one line."""
        where = f"call {self.index} ({self.module}, {'x'.join(map(str, self.query[-2:-1] + self.key[-2:-1]))})"
        if self.status == "raised":
            return f"{where} raised {self.reason}"
        rows = f"{self.wrong_rows} query row{'s' if self.wrong_rows != 1 else ''}"
        first = "batch {}, head {}, row {}".format(*self.rows[0]) if self.rows else "place unknown"
        odd = self.reason.removeprefix("is ") or "NaN or Inf"  # the reason: finite where the definition gives NaN
        how = odd if self.status == "nonfinite" else f"{self.ratio:.3g} x the threshold"
        return f"{where} is wrong in {rows} (first: {first}): {how}, {self.kernel}"


def describe_mask(call: AttentionCall) -> str:
    """The mask in a few words: "none", "causal flag", "bool (1, 1, 289, 289)", and both flag and mask if both."""
    mask: Any = call.attn_mask
    words = []
    if mask is not None:
        variant = getattr(mask, "variant", None)
        plain = f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
        words.append(f"CausalBias {variant.name}" if variant is not None else plain)
    if call.is_causal:
        words.append("causal flag")
    return " + ".join(words) or "none"


def nothing_seen(summary: Mapping[str, Any]) -> str:
    """Why there is no record, from what a summary says was seen instead, and what to do, in one line."""
    if summary["seen"] and summary["problems"]:
        return (
            f"none of the {summary['seen']} scaled_dot_product_attention calls could be recorded: "
            f"{summary['problems'][0]}; mend that, or run again with another --out"
        )
    if summary["seen"]:
        modules = ", ".join(summary["modules"][:4]) + (", …" if len(summary["modules"]) > 4 else "")
        return (
            f"none of the {summary['seen']} scaled_dot_product_attention calls matches "
            f"{selection(summary['options'])}; seen: calls 0-{summary['seen'] - 1} in {modules}; "
            "run again without the selection"
        )
    causes = [f"{count} x {reason}" for reason, count in summary["passed"].items()]
    causes += [f"{count} calls in thread {name!r}" for name, count in summary["elsewhere"].items()]
    causes += summary["hints"]
    advice = _advice(summary)
    found = f"seen instead: {'; '.join(causes)}" if causes else "nothing else that computes attention was noticed"
    return f"no scaled_dot_product_attention call was seen; {found}; {advice}"


def selection(options: Mapping[str, Any]) -> str:
    """The selection as the user wrote it: `--call 3 --module self_attn`."""
    words = [f"--{name} {options[name]}" for name in ("call", "module") if options.get(name) is not None]
    words += [f"--phase {options['phase']}"] if options.get("phase", "all") != "all" else []
    return " ".join(words) or "the selection"


def _advice(summary: Mapping[str, Any]) -> str:
    """The next thing to try, for the first cause that has one."""
    passed = " ".join(summary["passed"])
    if summary["elsewhere"]:
        return "capture all threads with all_threads=True, or run the script under: sdpa-repro capture -- script.py"
    if "fused torch" in passed:
        return "run again with torch.backends.mha.set_fastpath_enabled(False)"
    if "torch.compile" in passed:
        return UNCOMPILED
    if "CUDA graph" in passed:
        return "run again without CUDA graphs"
    if any("child process" in hint for hint in summary["hints"]):
        return "run the whole script under: sdpa-repro capture -- script.py"
    if any("torch.compile" in hint for hint in summary["hints"]):
        return UNCOMPILED
    if any("function itself" in hint for hint in summary["hints"]):
        return "start the capture before they are made, or run the script under: sdpa-repro capture -- script.py"
    if any("attn_implementation" in hint for hint in summary["hints"]):
        return "load the model with attn_implementation='sdpa' and run again"
    return "if a transformers model is to be looked at, load it with attn_implementation='sdpa' and run again"
