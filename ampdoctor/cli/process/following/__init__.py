"""A log that is shown while it grows."""
