"""Where people already look."""
