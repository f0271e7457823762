"""Prompts: where they come from, in which order, and which of them are done."""
