"""The same call as a unit test: one test with a case a backend, in the style of PyTorch's own tests.

PyTorch's own `TestCase` (torch.testing._internal.common_utils) needs the package expecttest, so the test uses the
standard library's, with `torch.testing.assert_close`, and runs wherever torch is installed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from sdpa_repro.attention import AttentionCall
from sdpa_repro.errors import InputError
from sdpa_repro.publishing.limit import rounding_limit
from sdpa_repro.publishing.script import call_text, definition, device_line, header, live_line, odd_rows
from sdpa_repro.publishing.story import Story
from sdpa_repro.publishing.tensor_lines import tensor_lines
from sdpa_repro.recipe import Recipe
from sdpa_repro.replaying.reference import reference

BODY = """\
import unittest
from contextlib import nullcontext
{more}
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
{bias}
BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "default")


class TestScaledDotProductAttention(unittest.TestCase):
    def test_against_float64(self):
{setup}
        for name in BACKENDS:
            with self.subTest(backend=name):
                try:
                    with {context}:
                        out = {call}
                except (AttributeError, RuntimeError) as declined:
                    print(f"{{name}} declined: {{str(declined).split('.')[0][:90]}}")
                    continue
                torch.testing.assert_close({compared}, rtol=0.0, atol={limit:.3g}{exact})


if __name__ == "__main__":
    unittest.main()
"""


def unit_test(call: AttentionCall, recipes: Mapping[str, Recipe], story: Story) -> str:
    """Source of `test_repro.py`: fails while the bug is there; needs torch alone.

    Raises InputError for a crash or a hang, which would end the test run, for what fails now and then, and for a
    backend that raises, which the test takes for one that declines: the script has ways for those.
    """
    if story.ends_process:
        raise InputError("a backend that ends the process would end the test run: use repro.py")
    if story.runs > 1 or story.status == "error":
        raise InputError("it does not fail every time, or by an error that looks like a declined call: use repro.py")
    tensors = tensor_lines(call, recipes, inline=story.inline, remarks=story.remarks, file=story.file)
    limit = story.limit if story.limit is not None else rounding_limit(call, story.autocast)[0]
    right = reference(call)
    live = live_line(call, right)
    setup = [*story.settings, device_line(story.device), *tensors.lines]
    if story.grad:
        setup += [f"{'mask' if name == 'attn_mask' else name}.requires_grad_()" for name in story.requires_grad]
    setup += [*definition(call, story), *([live] if live else [])]
    context = 'nullcontext() if name == "default" else sdpa_kernel(getattr(SDPBackend, name))'
    if story.autocast:
        context = f"torch.autocast(device, torch.{story.autocast}), {context}"
    if not story.grad:
        context = f"torch.no_grad(), {context}"
    out = f"out{'.detach()' if story.grad else ''}{'.cpu()' if story.device in ('mps', 'xpu') else ''}.double()"
    expected, exact = "expected", ""
    if odd_rows(call, right):  # infinite where the dtype ends, and NaN where it belongs
        expected, exact = "expected.to(out).double()", ", equal_nan=True"
    body = BODY.format(
        more="from pathlib import Path\n" if tensors.stored else "",
        bias=f"from torch.nn.attention.bias import {tensors.bias}\n" if tensors.bias else "",
        setup=textwrap.indent("\n".join(setup), " " * 8),
        context=context,
        call=call_text(call),
        compared=f"{out}[live], {expected}[live]" if live else f"{out}, {expected}",
        exact=exact,
        limit=limit,
    )
    return f"{header(story, tensors)}\n{body}"
