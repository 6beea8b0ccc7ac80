"""What a script and an issue are about: the backend, how it fails, why, and under which switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FAILURE = {
    "diverges": "gives a wrong result",
    "nonfinite": "gives NaN or infinity where the definition gives neither, or the reverse",
    "crashed": "ends the process",
    "timeout": "does not return",
    "error": "raises an error",
}
"""How a backend fails (a status of `replaying.verdict.Status`), and that in words."""

BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE", "default")


@dataclass(frozen=True)
class Story:
    """The facts that a script states or depends on.

    cause: one sentence. needs: phrases. requires_grad: arguments that want a gradient; without `grad` the call runs
    under `torch.no_grad()`. limit: largest error allowed in a row, with `limit_reason`; None: what rounding explains.
    remarks: a comment by argument, for the line whose layout matters. settings: lines that set switches, and
    `autocast`, a dtype's name. inline: whether values without a closed form may be written out. timeout: seconds that
    a backend gets where one crashes or hangs. device: "cpu", "cuda", …. file: the dump that holds values.
    runs: how often each backend is run; more than once where it does not fail every time. searched: whether closed
    forms of the values were looked for.
    """

    backend: str
    status: str = "diverges"
    cause: str = ""
    needs: tuple[str, ...] = ()
    grad: bool = False
    requires_grad: tuple[str, ...] = ()
    limit: float | None = None
    limit_reason: str = ""
    remarks: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    autocast: str | None = None
    inline: bool = False
    timeout: int = 30
    device: str = "cpu"
    file: str = "call.pt"
    runs: int = 1
    searched: bool = True

    @property
    def ends_process(self) -> bool:
        """Whether every backend has to run in a process of its own."""
        return self.status in ("crashed", "timeout")


def switches(context: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Story` that a dump's recorded context decides; what it does not say is left at its default."""
    found: dict[str, Any] = {}
    wants = context.get("requires_grad")
    if context.get("grad") is True and context.get("inference") is not True:
        found["grad"] = True
        if isinstance(wants, Mapping):
            found["requires_grad"] = tuple(
                name for name in ("query", "key", "value", "attn_mask") if wants.get(name) is True
            )
    autocast = context.get("autocast")
    if isinstance(autocast, Mapping) and autocast.get("enabled") is True:
        dtype = autocast.get("dtype")
        found["autocast"] = dtype if dtype in ("bfloat16", "float16") else None
    found["settings"] = tuple(_settings(context))
    kind = str(context.get("device") or "cpu").partition(":")[0]
    found["device"] = kind if kind in ("cpu", "cuda", "mps", "xpu") else "cpu"
    return found


def _settings(context: Mapping[str, Any]) -> list[str]:
    """Lines for the switches that are not as a fresh process has them."""
    lines = []
    if context.get("deterministic") is True:
        lines.append("torch.use_deterministic_algorithms(True, warn_only=True)")
    if context.get("matmul_precision") in ("high", "medium"):
        lines.append(f'torch.set_float32_matmul_precision("{context["matmul_precision"]}")')
    if context.get("math_half_reduction") is True:
        lines.append("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)")
    if context.get("flush_denormal") is True:
        lines.append("torch.set_flush_denormal(True)")
    return lines
