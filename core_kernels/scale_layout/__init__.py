"""Scales in the layout of Blackwell's tensor cores."""
