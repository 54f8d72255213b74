"""Reads the files of `torch.distributed.checkpoint`: its metadata, the entries in its files, slices in safetensors."""
