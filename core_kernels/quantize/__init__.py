"""Quantization to MXFP8 and back."""
