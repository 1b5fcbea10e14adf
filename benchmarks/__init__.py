"""Every figure of the project comes from here: `python -m benchmarks`.

    cases/     measured code: shapes, inputs and checks, one file per op family, and the MoE layer
    peers/     against what: a device copy, compiled formulas, torch's, cuBLAS's and XLA's products, a plain bf16 layer
    figures/   how it is timed, stored, compared with its bar, and printed

    gpu.py (gpu_ops.py, gpu_grouped_gemm.py, gpu_moe_layer.py)   the section of one GPU
    ep.py    ep_jax.py                                           the sections of several GPUs
    readme.py                                                    the generated documents

A section joins the three folders. `cases` imports `peers`; `peers` and `figures` import neither of the others.
"""
