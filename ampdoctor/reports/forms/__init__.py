"""One renderer a file."""
