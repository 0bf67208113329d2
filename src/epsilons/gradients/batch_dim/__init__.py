"""The batch dimension of tensors, followed from operation to operation."""
