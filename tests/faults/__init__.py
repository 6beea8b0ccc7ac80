"""Emulated kernel bugs: files for `--preload`, and the two helpers they share."""
