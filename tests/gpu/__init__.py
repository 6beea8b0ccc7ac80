"""Tests that need CUDA; without it they are skipped, and still imported and type-checked."""
