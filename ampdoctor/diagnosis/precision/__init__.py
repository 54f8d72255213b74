"""What each layer can be computed in."""
