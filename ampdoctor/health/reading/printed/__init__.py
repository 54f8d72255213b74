"""What a training prints, as a log."""
