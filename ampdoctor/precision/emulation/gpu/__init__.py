"""What code written for a GPU asks of torch, and what it hears where there is none."""
