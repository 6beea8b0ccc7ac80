"""Tests of the parts of the dump file."""
