"""Gathers of rows through a row map: permute, pad and un-permute."""
