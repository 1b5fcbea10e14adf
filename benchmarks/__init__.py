"""Every figure of the project comes from here: `python -m benchmarks`.

    cases/     measured code: inputs and checks of the sizes `TIMED` in core_kernels/*/cases.py, and the MoE layer
    peers/     against what: a device copy, compiled formulas, torch's, cuBLAS's and XLA's products, a plain bf16 layer,
               SonicMoE's layer
    figures/   how it is timed, stored, compared with its bar, and printed

    gpu.py (gpu_ops.py, gpu_grouped_gemm.py, gpu_moe_layer.py)   the section of one GPU
    ep.py    ep_jax.py                                           the sections of several GPUs
    readme.py                                                    the generated documents

A section joins the three folders. `cases` imports `peers`, which imports neither of the others; `figures` imports the
shapes alone.
"""
