"""SwiGLU with folded results."""
