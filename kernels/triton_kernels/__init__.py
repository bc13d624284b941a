"""Triton kernels, each with its specification in a few lines of PyTorch beside it."""
