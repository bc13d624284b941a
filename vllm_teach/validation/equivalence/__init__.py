"""Greedy output equals transformers' token for token, however the engine is set: the check behind that sentence.

Run it with `python -m vllm_teach.validation.equivalence`.
"""
