"""Triton kernels for what torch has no fast operation for. Used on CUDA devices where Triton is installed.

Each has a plain torch spelling beside it that says what it computes, that the tests hold it to, and that runs
everywhere else. Nothing here knows of models, optimizers or pipelines.
"""
