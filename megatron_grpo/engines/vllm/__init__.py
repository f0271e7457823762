"""vLLM as the engine: replicas of AsyncLLM and the receiving end of weight updates. Imported only in their processes."""
