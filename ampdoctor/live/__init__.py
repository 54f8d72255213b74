"""A training loop that is somebody else's, watched while it runs."""
