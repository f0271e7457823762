"""Recipes: the typed schema, loading, and the rules that span several keys. Free of torch, ray and megatron."""
