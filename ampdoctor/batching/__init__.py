"""The batch of an optimizer step, cut for a cluster: micro-batch, accumulation and data parallel ranks. No torch."""
