"""Backends of other libraries for mxep.conformance, by their own names. store.py keeps their reports for the docs.

library itself             torchao, onnx, gfloat, jax_nn, qwix
formulas, transcribed      microxcaling, transformer_engine, deep_gemm
"""
