"""Bugs of PyTorch's attention kernels that are already reported, as data, and which of them a failing call matches.

Sources are the issues and pull requests of that number at github.com/pytorch/pytorch (or ROCm/pytorch). A version
range says where the bug was seen; `fixed_in` is the first release without it, None when no such release is known.
Rounding, top-left causal alignment, finfo.min rows and NaN in masked-out positions are no bugs and have no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from sdpa_repro import issue_triggers as bug
from sdpa_repro.attention import AttentionCall
from sdpa_repro.situation import (
    Answer,
    Situation,
    affected,
    every,
    first_key_block_hidden,
    fully_masked_row,
    on_rocm,
    release,
    yes,
)

SDP_BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE")
OLDEST_TORCH = "2.5"
"""The oldest release this program runs on: an emulated bug that was fixed by then is not proposed."""

WRONG = frozenset({"diverges", "nonfinite", "unstable"})
SILENT = frozenset({"diverges"})
NAN = frozenset({"nonfinite"})
CRASH = frozenset({"crashed"})
OUT_OF_BOUNDS = WRONG | CRASH
ACCEPTED = OUT_OF_BOUNDS | {"agrees", "not_comparable", "error"}
GRADIENT: frozenset[str] = frozenset()
"""Statuses (as in `replaying.verdict.Status`) under which a bug shows; none for one that leaves the output right."""

Rows = Callable[[Situation, Collection[int]], bool]
"""Whether the query rows found wrong are those that the bug makes wrong."""


@dataclass(frozen=True)
class KnownIssue:
    """One upstream bug. `trigger` looks only at the call, grad mode and GPU; the other fields are matched apart.

    device: "cuda", "rocm", "cpu", "mps" or "any". first/last: torch releases the bug was seen in, None = open end.
    """

    issue: str
    title: str
    backends: tuple[str, ...]
    device: str
    first: str | None
    last: str | None
    fixed_in: str | None
    effect: str
    workaround: str
    trigger: Callable[[Situation], Answer]
    symptoms: frozenset[str] = WRONG
    rows: Rows | None = None

    @property
    def backend(self) -> str:
        return ", ".join(self.backends)


@dataclass(frozen=True)
class Match:
    """A known issue that fits a failing call. match: "exact", "possible" (a condition is unknown) or "emulated"."""

    issue: str
    match: str
    title: str
    fixed_in: str | None
    workaround: str


def matches(
    call: AttentionCall,
    backend: str,
    device_type: str,
    torch_version: str,
    grad: bool,
    *,
    capability: tuple[int, int] | None = None,
    emulated: bool = False,
    status: str | None = None,
    wrong_rows: Collection[int] | None = None,
) -> list[Match]:
    """Known issues that fit a call which failed on `backend`; the best fit first, the most specific of equals.

    status and wrong_rows (indices of query rows, all batches and heads taken together) narrow the answer when
    they are known: a bug that spoils the last row does not explain a crash or a wrong row 0. With `emulated`
    (something was preloaded) device, kernel and version are not compared: a CUDA bug may be planted on a CPU.
    """
    name = backend_name(backend)
    situation = Situation(call, name, device_type, torch_version, grad, capability, emulated)
    found = []
    for known in KNOWN_ISSUES:
        if status is not None and status not in known.symptoms:
            continue
        if known.rows is not None and wrong_rows and not known.rows(situation, wrong_rows):
            continue
        kind = _kind(known, situation, emulated)
        if kind is not None:
            found.append(Match(known.issue, kind, known.title, known.fixed_in, known.workaround))
    return sorted(found, key=lambda match: ("exact", "emulated", "possible").index(match.match))


def _kind(known: KnownIssue, situation: Situation, emulated: bool) -> str | None:
    """ "exact", "possible", "emulated", or None."""
    here = where(known, situation.backend, situation.device_type, situation.torch_version)
    if here is Answer.NO and not (emulated and may_be_emulated(known, situation.backend)):
        return None
    try:
        answer = min(here, known.trigger(situation)) if not emulated else known.trigger(situation)
    except (IndexError, RuntimeError):
        return None  # fewer dimensions than the kernel takes, or a tensor without memory to look at
    if emulated:
        return "emulated" if answer is Answer.YES else None
    return {Answer.YES: "exact", Answer.MAYBE: "possible", Answer.NO: None}[answer]


def where(known: KnownIssue, backend: str, device_type: str, torch_version: str) -> Answer:
    """Whether this backend, device and torch release can have the bug at all."""
    return every(
        _backend_fits(known, backend),
        _device_fits(known, device_type, torch_version),
        affected(torch_version, known.first, known.last, known.fixed_in),
    )


def backend_name(backend: object) -> str:
    """The name of a backend given as text, as a member of `SDPBackend` or of `replaying.backends.Backend`."""
    if isinstance(backend, Enum) and isinstance(backend.value, str):
        return backend.value
    return str(getattr(backend, "name", backend)).rpartition(".")[2] if not isinstance(backend, str) else backend


def sentence(match: Match, backend: str, device_type: str) -> str:
    """For the first line of a report: "pytorch#191937 (as emulated here on FLASH_ATTENTION, CPU), fixed in 2.14.0"."""
    how = {
        "exact": "",
        "possible": " (possibly)",
        "emulated": f" (as emulated here on {backend_name(backend)}, {device_type.upper()})",
    }[match.match]
    return f"{match.issue}{how}, " + (f"fixed in {match.fixed_in}" if match.fixed_in else "no release with a fix known")


def versions(known: KnownIssue) -> str:
    """The affected releases in words: "2.2 to 2.13, fixed in 2.14.0"."""
    first, last = known.first, known.last
    span = {
        (True, True): f"{first} to {last}" if first != last else f"{first}",
        (True, False): f"{first} on",
        (False, True): f"up to {last}",
        (False, False): "not stated",
    }[first is not None, last is not None]
    return span + (f", fixed in {known.fixed_in}" if known.fixed_in else "")


def may_be_emulated(known: KnownIssue, backend: str) -> bool:
    """A planted fault lives in an SDP kernel; a bug older than every torch in use is not what was planted."""
    old = known.fixed_in is not None and release(known.fixed_in)[0] <= release(OLDEST_TORCH)[0]
    return not old and known.backends[0] in SDP_BACKENDS and (backend in SDP_BACKENDS or backend == "default")


def _backend_fits(known: KnownIssue, backend: str) -> Answer:
    if backend in known.backends:
        return Answer.YES
    return Answer.MAYBE if backend == "default" and known.backends[0] in SDP_BACKENDS else Answer.NO


def _device_fits(known: KnownIssue, device_type: str, torch_version: str) -> Answer:
    if known.device == "any":
        return Answer.YES
    device = "rocm" if device_type == "cuda" and on_rocm(torch_version) else device_type
    return yes(known.device == device)


_DENSE_KV = "key, value = key.contiguous(), value.contiguous()"
_MATH = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ...  # around the call"
_NO_CUDNN = "torch.backends.cuda.enable_cudnn_sdp(False)"
_NO_FAST_PATH = "torch.backends.mha.set_fastpath_enabled(False)"
_EFFICIENT, _CUDNN, _FLASH = ("EFFICIENT_ATTENTION",), ("CUDNN_ATTENTION",), ("FLASH_ATTENTION",)
_MPS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
_FAST_PATH = ("nn.TransformerEncoderLayer", "nn.MultiheadAttention")

KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    KnownIssue(
        "pytorch#191937",
        "The last query row, alone in its block, uses mask row 0 when key and value repeat one head with stride 0",
        _EFFICIENT, "cuda", "2.2", "2.13", "2.14.0",
        "query row L-1 is computed with mask row 0 (L % 32 == 1 for head_dim > 128, L % 64 == 1 below)",
        _DENSE_KV, bug.tail_row_uses_first_mask_row, SILENT, bug.only_last,
    ),
    KnownIssue(
        "pytorch#192138",
        "A lone last query row is mishandled with more heads than a block has rows, and under is_causal with S > L",
        _EFFICIENT, "cuda", None, "2.13", "2.14.0",
        "reads and writes past query, mask and output in heads from 32 or 64 on; row L-1 sees keys past the diagonal",
        _DENSE_KV, bug.lone_row_is_remapped, OUT_OF_BOUNDS, bug.remapped_rows,
    ),
    KnownIssue(
        "pytorch#187227",
        "The offset of a mask row wraps at 32 bits (also reported as pytorch#162588)",
        _EFFICIENT, "cuda", None, "2.12", "2.13.0",
        "query rows from 2**32 // S on use mask rows from the beginning",
        "split the query into blocks of rows with rows * S < 2**32", bug.mask_offset_wraps, rows=bug.past_32_bits,
    ),
    KnownIssue(
        "pytorch#112577",
        "Key and value expanded from one head give garbage together with a mask",
        _EFFICIENT, "cuda", "2.1", "2.1", "2.2.0",
        "the mask is read with a wrong stride",
        _DENSE_KV, bug.expanded_with_mask, OUT_OF_BOUNDS,
    ),
    KnownIssue(
        "pytorch#108503",
        "A bool block-diagonal mask gives a wrong result in bfloat16 at length 600",
        _EFFICIENT, "cuda", "2.0", "2.0", "2.1.0",
        "wrong output", _MATH, bug.block_diagonal_bfloat16,
    ),
    KnownIssue(
        "pytorch#124877",
        "Cross attention with a mask gives NaN",
        _EFFICIENT, "cuda", "2.2", "2.4", "2.5.0",
        "NaN in rows that see keys, for example at L = 8, S = 16", _MATH, bug.cross_attention_with_mask, NAN,
    ),
    KnownIssue(
        "pytorch#196678",
        "The gradient of query is NaN with a mask, S % 128 == 64 and a row whose log-sum-exp is below -88.7",
        _CUDNN, "cuda", "2.11", "2.13", None,
        "NaN in the gradient of query; the output is right", _NO_CUDNN, bug.half_key_tile_in_backward, GRADIENT,
    ),
    KnownIssue(
        "pytorch#191612",
        "A float32 mask beside 16-bit query, key and value is read as 16-bit",
        _CUDNN, "cuda", None, "2.13", "2.14.0",
        "wrong or NaN output", "attn_mask = attn_mask.to(query.dtype)", bug.wide_mask_read_as_half, rows=bug.most,
    ),
    KnownIssue(
        "pytorch#193893",
        "Grouped-query attention with fewer than 8 key/value heads degrades on B200",
        _CUDNN, "cuda", "2.11", "2.13", None,
        "deterministic wrong output; EFFICIENT_ATTENTION and MATH are right", _NO_CUDNN, bug.few_kv_heads_on_b200,
    ),
    KnownIssue(
        "pytorch#193728",
        "Key and value of different length are accepted",
        _FLASH, "cpu", "2.1", "2.14.1", None,
        "a value longer than key reads past the end of key, a shorter one drops the last keys",
        "assert key.shape[-2] == value.shape[-2]", bug.unequal_key_and_value, ACCEPTED,
    ),
    KnownIssue(
        "pytorch#187801",
        "attn_mask and is_causal together are accepted",
        _FLASH, "cpu", "2.3", "2.13", "2.14.0",
        "both are applied, where other backends raise", "is_causal = False  # and put the causal rule into attn_mask",
        bug.mask_and_flag, ACCEPTED,
    ),
    KnownIssue(
        "pytorch#187506",
        "The aten flash op called directly ignores an innermost stride other than 1",
        _FLASH, "cpu", None, "2.13", "2.14.0",
        "wrong output, may read out of bounds",
        "query, key, value = query.contiguous(), key.contiguous(), value.contiguous()",
        bug.inner_stride, OUT_OF_BOUNDS,
    ),
    KnownIssue(
        "pytorch#141219",
        "The aten flash op called directly with a query of length 0 divides by zero",
        _FLASH, "cpu", "2.3", "2.14.1", None,
        "SIGFPE", "call torch.nn.functional.scaled_dot_product_attention, which returns before the kernel",
        bug.no_query_rows, CRASH,
    ),
    KnownIssue(
        "pytorch#141218",
        "enable_gqa with no key/value heads divides by zero",
        SDP_BACKENDS, "any", "2.5", "2.9", "2.10.0",
        "SIGFPE", "assert key.shape[-3] > 0", bug.no_kv_heads, CRASH,
    ),
    KnownIssue(
        "pytorch#127055",
        "A row that sees none of the first 512 keys is NaN",
        _FLASH, "cpu", "2.3", "2.3", "2.4.0",
        "NaN in rows that see later keys", _MATH, first_key_block_hidden, NAN,
    ),
    KnownIssue(
        "pytorch#103963",
        "A fully masked row is NaN instead of 0 (also reported as pytorch#103749)",
        SDP_BACKENDS, "any", None, "2.4", "2.5.0",
        "NaN in rows that may see no key", "output = output.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)",
        fully_masked_row, NAN,
    ),
    KnownIssue(
        "pytorch#163597",
        "The stride of a transposed query is ignored for up to 8 query rows",
        _MPS, "mps", "2.8", "2.8", "2.9.0",
        "wrong output", "query = query.contiguous()", bug.mps_transposed_query, OUT_OF_BOUNDS, bug.most,
    ),
    KnownIssue(
        "pytorch#181133",
        "Batch strides of permuted query, key and value are ignored for up to 8 query rows",
        _MPS, "mps", "2.8", "2.11", "2.12.0",
        "wrong output in all but the first batch row",
        "query, key, value = query.contiguous(), key.contiguous(), value.contiguous()",
        bug.mps_permuted_batch, OUT_OF_BOUNDS, bug.most,
    ),
    KnownIssue(
        "pytorch#169222",
        "Keys past the end are read when S is no multiple of 32, for up to 8 query rows",
        _MPS, "mps", "2.8", "2.9", "2.10.0",
        "output depends on what memory holds after key and value", "pad key and value to a multiple of 32 and mask it",
        bug.mps_partial_key_block, OUT_OF_BOUNDS, bug.most,
    ),
    KnownIssue(
        "ROCm/pytorch#3230",
        "A non-contiguous value gives a wrong result on MI300X",
        ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"), "rocm", None, None, None,
        "wrong output", "value = value.contiguous()", bug.strided_value, rows=bug.most,
    ),
    KnownIssue(
        "pytorch#118628",
        "The fast path gives NaN for additive float masks and fully masked rows (also pytorch#190486, #160064)",
        _FAST_PATH, "any", "2.0", "2.14.1", None,
        "NaN, without any call of scaled_dot_product_attention", _NO_FAST_PATH, bug.fast_path_mask, NAN,
    ),
    KnownIssue(
        "pytorch#195320",
        "torch.compile fuses attention with a permuted key into a wrong call",
        ("inductor",), "cpu", "2.13", "2.14.1", None,
        "wrong output of the compiled code, right when not compiled",
        "compute scores as torch.matmul(query, key.transpose(-2, -1)) with key (B, H, S, E)", bug.permuted_key,
    ),
)  # fmt: skip
"""Most specific first: of two that fit equally well, the earlier one is the likelier cause."""
