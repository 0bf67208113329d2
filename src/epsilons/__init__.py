"""Every training example has its own ε."""
