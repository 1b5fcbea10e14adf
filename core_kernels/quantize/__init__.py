"""Quantization to MXFP8 along rows, columns or both, and dequantization."""
