"""The experiments, one file for each table or group of rows. Each names its rows, what would confirm them, and why.

A file imports torch and what measures inside its functions, so that the checks can be read without either.
"""
