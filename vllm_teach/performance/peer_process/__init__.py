"""Systems that serve in a process of their own, in whichever interpreter they are installed.

vLLM's CPU build pins its own PyTorch, so it cannot live where this package does. `client` starts `server` there, as a
file: nothing of vllm_teach is imported in that process, and no other package's version is a condition.
"""
