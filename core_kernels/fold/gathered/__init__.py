"""Folded operands of MXFP8 rows."""
