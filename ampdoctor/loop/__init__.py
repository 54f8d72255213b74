"""What any training loop has, whether it is replayed here or somebody else's."""
