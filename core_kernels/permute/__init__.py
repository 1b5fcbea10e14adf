"""Rows gathered through a row map."""
