"""How new weights reach the engine: strategies (`drain`, `colocated`) and the transfer they use."""
