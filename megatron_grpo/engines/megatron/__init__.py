"""Megatron-Core: the trained model and its engine.

Importing modules of this package imports megatron: call `Accelerator.prepare()` first.
"""
