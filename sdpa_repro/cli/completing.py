"""What a shell offers for an argument when Tab is pressed: dumps where a dump is wanted."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

PATH = click.Path(path_type=Path, readable=False)
"""A file or folder for any verb. Whether it is there and can be read is said by whoever reads it, in words of ours."""


def dumps(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The dumps (`*.pt`) and folders whose path begins with `incomplete`; for an argument's `shell_complete`.

    Where no dump fits, the shell completes any file, as it does elsewhere: its own completion goes on inside a
    folder without a space in between.
    """
    folder, start = os.path.split(incomplete)
    try:
        inside = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        inside = []
    fitting = [entry for entry in inside if entry.name.startswith(start)]
    files = [os.path.join(folder, entry.name) for entry in fitting if Path(entry.name).suffix == ".pt"]
    if not files:
        return [CompletionItem(incomplete, type="file")]
    folders = [os.path.join(folder, entry.name, "") for entry in fitting if entry.is_dir() and entry.name[0] != "."]
    return [CompletionItem(path) for path in files + folders]
