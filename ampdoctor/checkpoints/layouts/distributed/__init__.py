"""What `torch.distributed.checkpoint` writes: its metadata, the entries in its files, slices in safetensors."""
