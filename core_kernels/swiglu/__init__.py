"""SwiGLU between an expert's two grouped products, fused with the quantization of its result."""
