"""The script that a maintainer runs: one call, every backend, float64, an assertion; it imports torch alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import torch

from sdpa_repro.attention import AttentionCall, is_rule
from sdpa_repro.publishing.escaping import comment
from sdpa_repro.publishing.limit import rounding_limit
from sdpa_repro.publishing.story import FAILURE, Story
from sdpa_repro.publishing.tensor_lines import WIDTH, TensorText, tensor_lines
from sdpa_repro.recipe import Recipe
from sdpa_repro.replaying.reference import Reference, four_dims, reference

ORDER = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "default")
"""Backends in the order in which they run; the guilty one goes last where it may end the process."""

IMPORTS = """\
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
"""

COMPARE = """\
print(f"torch {{torch.__version__}} on {{device}}; largest error against float64, at most {{limit}} is rounding")
wrong = []
for name in {order}:
    try:
        with {context}:
            out = {call}
    except (AttributeError, RuntimeError) as declined:
{declined}
        continue
    {error}
    at = F.pad((~(error <= limit)).view(-1, error.shape[-1]).any(0).int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    rows = [f"{{a}}-{{b - 1}}" if b - a > 1 else str(a) for a, b in zip(at[:16:2], at[1::2])] + ["..."] * (len(at) > 16)
    print(f"{{name:20}} {{error.max():10.4g}}" + f"  wrong in query rows {{', '.join(rows)}}" * bool(rows))
    wrong += [name] * bool(rows)
"""

DECLINED = """\
        print(f"{{name:20}} declined: {{str(declined).split('.')[0][:90]}}")"""

RAISED = """\
        wrong += [name] * (name in {guilty})
        said = "raised" if name in wrong else "declined"
        print(f"{{name:20}} {{said}}: {{str(declined).split('.')[0][:90]}}")"""

CHILDREN = """\
if len(sys.argv) > 1:  # a child: one backend, which may not come back
    name = sys.argv[1]
    with {grad}{context}:
        {call}.cpu()
    sys.exit()

print(f"torch {{torch.__version__}} on {{device}}; every backend in a process of its own")
failed = []
for name in {order}:
{child}
    error = child.stderr.rpartition("Error: ")[2].split("\\n")[0].split(".")[0][:90]
    said = {{0: "ok", 1: f"declined: {{error}}"}}.get(child.returncode, f"died with {{child.returncode}}")
    print(f"{{name:20}} {{said}}", flush=True)
    failed += [name] * (child.returncode not in (0, 1) or error.startswith(("CUDA error", "HIP error")))
assert not failed, f"{what} in {{', '.join(failed)}}"
"""

CHILD = """\
    child = subprocess.run([sys.executable, "-I", __file__, name], stderr=subprocess.PIPE, text=True)"""

CHILD_IN_TIME = """\
    command = [sys.executable, "-I", __file__, name]
    try:
        child = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout={wait})
    except subprocess.TimeoutExpired:
        print(f"{{name:20}} timed out", flush=True)
        failed += [name]
        continue"""


def script(call: AttentionCall, recipes: Mapping[str, Recipe], story: Story) -> str:
    """Python source that fails with an AssertionError while the bug is there and exits with 0 where it is not.

    recipes: closed forms by argument name, which must build the call's tensors; others are written out or read from
    the dump `story.file` beside the script (see `tensor_lines`). Raises InputError when the call cannot be shown.
    """
    tensors = tensor_lines(call, recipes, inline=story.inline, remarks=story.remarks, file=story.file)
    parts = [
        header(story, tensors),
        _imports(story, tensors),
        "\n".join([*story.settings, device_line(story.device), *tensors.lines, *_gradients(story)]),
        _children(call, story) if story.ends_process else _comparison(call, story),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part).replace(parts[0] + "\n\n", parts[0] + "\n", 1) + "\n"


def header(story: Story, tensors: TensorText) -> str:
    """The comment on top: what is wrong, what it takes, and why values are not in closed form where they are not."""
    said = [story.cause or f"{story.backend} {FAILURE[story.status]}."]
    needs = [need for need in story.needs if need not in said[0]]
    if needs:
        said.append(f"Needs: {'; '.join(needs)}.")
    if story.runs > 1:
        said.append(f"It does not fail every time: each backend runs {story.runs} times.")
    names = _and(tensors.inline or tensors.stored)
    if names:
        why = f"No closed form of {names} was found that still fails" if story.searched else f"{names} as captured"
        where = "written out as integers" if tensors.inline else f"read from {story.file} (plain tensors)"
        said.append(f"{why}: the values are {where}.")
    lines = []
    for sentence in said:
        lines += textwrap.wrap(comment(sentence, 600), WIDTH - 2, break_long_words=True) or [""]
    return "\n".join(f"# {line}" for line in lines)


def device_line(device: str) -> str:
    """Where the script runs: a GPU's bug is looked for on the CPU too where there is no GPU."""
    if device == "cuda":
        return 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    return f'device = "{device}"'


def call_text(call: AttentionCall) -> str:
    """The call as source, with the arguments that are not at their default."""
    words = ["query", "key", "value"]
    if call.attn_mask is not None:
        words.append("attn_mask=mask")
    if call.is_causal:
        words.append("is_causal=True")
    if call.scale is not None:
        words.append(f"scale={call.scale!r}")
    if call.enable_gqa:
        words.append("enable_gqa=True")
    return f"F.scaled_dot_product_attention({', '.join(words)})"


def definition(call: AttentionCall, story: Story) -> list[str]:
    """Lines that compute `expected` in float64 without any attention kernel: only the branches that this call needs."""
    to = ".cpu().double()" if story.device in ("mps", "xpu") else ".double()"
    to = f".to(torch.{story.autocast}){to}" if story.autocast else to
    groups = call.query.shape[-3] // max(1, call.key.shape[-3]) if call.enable_gqa else 1
    shared = f".repeat_interleave({groups}, -3)" if groups > 1 else ""
    scale = "query.shape[-1] ** -0.5" if call.scale is None else repr(call.scale)
    lines = [f"scores = query{to} @ key{to}{shared}.mT" + ("" if call.scale == 1.0 else f" * {scale}")]
    hidden = _hidden(call)
    if hidden:
        lines.append(f'scores = scores.masked_fill({hidden}, float("-inf"))')
    elif call.attn_mask is not None and not is_rule(call.attn_mask):
        lines.append(f"scores = scores + mask{to}")
    if call.is_causal and call.attn_mask is not None:
        lines.append(f'scores = scores.masked_fill({_diagonal(call, 0)}, float("-inf"))')
    last = f"expected = scores.softmax(-1) @ value{to}{shared}"
    return [*lines, f"expected = (scores.softmax(-1) @ value{to}{shared}).detach()" if story.grad else last]


def _hidden(call: AttentionCall) -> str:
    """The expression that is True where a key is hidden; "" without such a mask."""
    mask = call.attn_mask
    if mask is None:
        return _diagonal(call, 0) if call.is_causal else ""
    if is_rule(mask):
        upper = int(getattr(mask, "variant", 1)) == 1
        return _diagonal(call, 0 if upper else call.key.shape[-2] - call.query.shape[-2])
    return "~mask" if mask.dtype == torch.bool else ""


def _diagonal(call: AttentionCall, offset: int) -> str:
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    return f"~torch.ones({rows}, {keys}, dtype=torch.bool, device=scores.device).tril({offset or ''})"


def live_line(call: AttentionCall, expected: Reference) -> str | None:
    """The line that says which rows count; None when all do.

    Left out: rows that may see no key, and rows that can see NaN or infinity in a key or value that is hidden from
    them, which backends are free to treat differently.
    """
    if bool(expected.decides.all()):
        return None
    words = []
    if not bool(expected.live.all()):
        words.append("fully masked")
    if bool(expected.poisoned.any()):
        words.append("poisoned by hidden NaN")
    text = "live = expected.isfinite().all(-1)"
    mask = four_dims(call).attn_mask
    if mask is not None and mask.dtype.is_floating_point:
        unlike = ~expected.live & (mask > -torch.inf).any(-1)  # finfo.min alone: the definition is finite there
        text += " & (mask > torch.finfo(mask.dtype).min).any(-1)" * bool(unlike.any())
    return f"{text}  # {' or '.join(words)} rows are left out"


def odd_rows(call: AttentionCall, expected: Reference) -> bool:
    """Whether rows that count hold NaN or infinity by definition, or what the dtype of value cannot hold."""
    kept = expected.output[expected.decides].to(call.value.dtype)
    return not bool(kept.isfinite().all())


def _comparison(call: AttentionCall, story: Story) -> str:
    """The reference, the loop over the backends and the assertion."""
    detach = ".detach()" if story.grad else ""
    moved = ".cpu()" if story.device in ("mps", "xpu") else ""
    error = f"(out{detach}{moved}.double() - expected).abs().amax(-1)"
    same = ""
    right = reference(call)
    if odd_rows(call, right):
        rounded = "torch.isclose(out, expected.to(out), rtol=0, atol=0, equal_nan=True)"
        same = f"same = {rounded}{moved}  # NaN and infinity where they belong\n    "
        error = error.replace(".abs()", ".abs().masked_fill(same, 0.0)")
    live = live_line(call, right)
    limit, reason = story.limit, story.limit_reason
    if limit is None:
        limit, reason = rounding_limit(call, story.autocast)
    body = definition(call, story)
    body += [live] if live else []
    body.append(f"limit = {limit:.3g}" + (f"  # {comment(reason)}" if reason else ""))
    guilty = (story.backend,) if story.backend == "default" else (story.backend, "default")
    raises = story.status == "error"
    body.append(
        COMPARE.format(
            order=_tuple(ORDER if story.backend in ORDER else (story.backend, *ORDER)),
            context=_context(story),
            call=call_text(call)
            if story.runs == 1
            else f"torch.stack([{call_text(call)} for _ in range({story.runs})])",
            declined=RAISED.format(guilty=repr(guilty).replace("'", '"')) if raises else DECLINED.format(),
            error=f"{same}error = torch.where(live, {error}, 0.0)" if live else f"{same}error = {error}",
        )
    )
    text = "\n".join(body).rstrip()
    if not story.grad:
        text = "with torch.no_grad():\n" + textwrap.indent(text, "    ")
    what = "error raised by" if raises else "wrong result from"
    return text + f"\nassert not wrong, f\"{what} {{', '.join(wrong)}}\""


def _children(call: AttentionCall, story: Story) -> str:
    """Every backend in a child process, the guilty one last; with a time limit where one does not return."""
    order = (*(name for name in ORDER if name != story.backend), story.backend)
    hangs = story.status == "timeout"
    return CHILDREN.format(
        grad="" if story.grad else "torch.no_grad(), ",
        order=_tuple(order),
        context=_context(story),
        call=call_text(call),
        child=CHILD_IN_TIME.format(wait=story.timeout) if hangs else CHILD,
        what="no answer" if hangs else "the process ended",
    )


def _context(story: Story) -> str:
    context = 'nullcontext() if name == "default" else sdpa_kernel(getattr(SDPBackend, name))'
    return f"torch.autocast(device, torch.{story.autocast}), {context}" if story.autocast else context


def _imports(story: Story, tensors: TensorText) -> str:
    standard = ["import subprocess", "import sys"] if story.ends_process else []
    standard.append("from contextlib import nullcontext")
    if tensors.stored:
        standard.append("from pathlib import Path")
    bias = f"from torch.nn.attention.bias import {tensors.bias}\n" if tensors.bias else ""
    return "\n".join(standard) + "\n\n" + IMPORTS + bias


def _gradients(story: Story) -> list[str]:
    names = ["mask" if name == "attn_mask" else name for name in story.requires_grad] if story.grad else []
    return [f"{name}.requires_grad_()" for name in names]


def _tuple(names: tuple[str, ...]) -> str:
    return "(" + ", ".join(f'"{name}"' for name in names) + ")"


def _and(names: tuple[str, ...]) -> str:
    names = tuple("mask" if name == "attn_mask" else name for name in names)
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
