"""The version, written here and nowhere else: setup.cfg reads it, and a checkout that is not installed has it."""

from __future__ import annotations

VERSION = "0.1.0"
