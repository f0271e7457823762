"""The arithmetic of GRPO as pure functions: advantages, masks, loss. Knows no batch layout and no process group."""
