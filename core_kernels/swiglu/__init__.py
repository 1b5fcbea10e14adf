"""SwiGLU between the two products of an expert, quantized on its way out."""
