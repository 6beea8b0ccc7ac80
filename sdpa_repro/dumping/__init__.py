"""The parts of the dump file: which bytes views cover, how they are packed, the archive, the schema."""

from __future__ import annotations


class Refused(ValueError):  # noqa: N818
    """A document or call that a dump cannot hold. The text is a short reason; `dump` turns it into an InputError."""


class NoDump(Refused):
    """What is there is another kind of file altogether."""
