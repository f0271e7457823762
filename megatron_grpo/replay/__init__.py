"""Groups between generation and training: which step they may serve, and where they wait for it."""
