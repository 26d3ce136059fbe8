"""Architectures known by name: one file each, found by `registry`."""
