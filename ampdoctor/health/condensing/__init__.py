"""What a page can hold of a run of a million steps."""
