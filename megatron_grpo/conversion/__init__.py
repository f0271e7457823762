"""Hugging Face models <-> Megatron-Core: what a configuration means, and where every weight lives on both sides."""
