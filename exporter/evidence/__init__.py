"""What readings over time mean: idle GPUs, still RAM, signs of life, lost GPUs, VRAM budgets. Pure."""
