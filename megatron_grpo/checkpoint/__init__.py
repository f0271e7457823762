"""Checkpoint directories that appear whole, and what lies beside them: the lock and the outcome of a run."""
