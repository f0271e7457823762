"""What a person sees of a run: the live display, the closing summary. Reads metrics, decides nothing."""
