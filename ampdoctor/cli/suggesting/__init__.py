"""What to type instead of a command line that was refused."""
