"""Which dimension of a tensor is the batch, followed from operation to operation."""
