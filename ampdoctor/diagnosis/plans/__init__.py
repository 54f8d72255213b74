"""Rules on the batch of a step on another cluster."""
