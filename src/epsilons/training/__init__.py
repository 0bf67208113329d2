"""From data to noisy steps: the PyTorch half."""
